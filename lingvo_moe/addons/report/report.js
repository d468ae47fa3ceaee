// Values of curves under the pointer. They are read from the tables of a figure, and shown as text.
for (const figure of document.querySelectorAll('figure')) {
  const svg = figure.querySelector('svg'), curves = [...svg.querySelectorAll('g[data-name]')];
  if (!curves.length) continue;
  const rows = new Map();  // of each curve: [x, value, least, largest], as the table has them
  for (const {rows: [head, ...body]} of figure.querySelectorAll('table')) {
    [...head.cells].forEach((cell, i) => {
      if (i && !rows.has(cell.textContent)) {
        const width = head.cells[i + 1]?.textContent === 'least' ? 3 : 1;
        rows.set(cell.textContent, body.map(row => [0, ...Array(width).keys()].map((k, n) => row.cells[n ? i + k : 0].textContent)));
      }
    });
  }
  const points = curve => [...curve.lastChild.getAttribute('d').matchAll(/(-?[\d.]+) (-?[\d.]+)/g)].map(m => [+m[1], +m[2]]);
  const shown = () => curves.filter(curve => getComputedStyle(curve.parentNode).display !== 'none');
  const add = (parent, name, text = '', space = 'http://www.w3.org/1999/xhtml') => {
    const made = document.createElementNS(space, name);
    made.textContent = text;
    return parent.appendChild(made);
  };
  const cursor = add(svg, 'g', '', svg.namespaceURI), tip = add(figure, 'div');
  tip.className = 'tip';
  tip.hidden = true;
  tip.setAttribute('role', 'status');
  let at = null;
  const hide = () => { at = null; tip.hidden = true; cursor.replaceChildren(); };
  const path = (kind, d) => {
    const made = add(cursor, 'path', '', svg.namespaceURI);
    made.setAttribute('class', kind);
    made.setAttribute('d', d);
  };
  const show = x => {
    const nearest = shown().map(curve => {
      const xys = points(curve);
      const i = xys.reduce((best, xy, i) => Math.abs(xy[0] - x) < Math.abs(xys[best][0] - x) ? i : best, 0);
      return {name: curve.dataset.name, kind: curve.getAttribute('class'), xy: xys[i], row: rows.get(curve.dataset.name)[i]};
    });
    const first = nearest.reduce((a, b) => Math.abs(b.xy[0] - x) < Math.abs(a.xy[0] - x) ? b : a);
    at = first.xy[0];
    tip.replaceChildren();
    cursor.replaceChildren();
    path('rule cursor', `M${at} 10V204`);
    add(tip, 'b', `${svg.dataset.x} ${first.row[0]}`);
    for (const {name, kind, xy, row: [step, value, least, largest]} of nearest) {
      path(`marks ${kind}`, `M${xy[0]} ${xy[1]}h0`);
      const range = largest === undefined ? '' : ` (${least} to ${largest})`;
      add(tip, 'span', `${name}: ${value}${range}${step === first.row[0] ? '' : ` at ${step}`}`).className = kind;
    }
    tip.hidden = false;
    const box = svg.getBoundingClientRect(), outer = figure.getBoundingClientRect();
    const left = box.left - outer.left + at / svg.viewBox.baseVal.width * box.width;
    tip.style.left = `${Math.max(0, left + tip.offsetWidth + 20 < outer.width ? left + 12 : left - tip.offsetWidth - 12)}px`;
    tip.style.top = `${box.top - outer.top + 8}px`;
  };
  const pointed = event => {
    const box = svg.getBoundingClientRect();
    show((event.clientX - box.left) / box.width * svg.viewBox.baseVal.width);
  };
  svg.addEventListener('pointermove', pointed);
  svg.addEventListener('pointerdown', pointed);
  svg.addEventListener('pointerleave', event => event.pointerType === 'mouse' && hide());
  svg.tabIndex = 0;
  svg.addEventListener('blur', hide);
  svg.addEventListener('keydown', event => {
    const xs = [...new Set(shown().flatMap(points).map(xy => xy[0]))].sort((a, b) => a - b);
    const to = {
      ArrowRight: xs.find(x => at === null || x > at), ArrowLeft: xs.findLast(x => at === null || x < at),
      Home: xs[0], End: xs.at(-1),
    };
    if (event.key === 'Escape') hide();
    if (!(event.key in to)) return;
    event.preventDefault();
    show(to[event.key] ?? at);
  });
  figure.querySelector('.scale')?.addEventListener('change', hide);
}
