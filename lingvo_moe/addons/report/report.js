// Values of curves under the pointer, which are read from the tables of a figure and shown as text.
const add = (parent, name, attributes, text = '') => {
  const made = parent.appendChild(document.createElementNS(parent.namespaceURI, name));
  for (const key in attributes) made.setAttribute(key, attributes[key]);
  made.textContent = text;
  return made;
};
const nearest = (points, x) => points.reduce((a, b) => Math.abs(b.x - x) < Math.abs(a.x - x) ? b : a);
for (const figure of document.querySelectorAll('figure:has(> svg[data-x])')) {
  const svg = figure.querySelector('svg'), columns = new Map();  // by curve: [x, value, least, largest] of each point
  for (const {rows: [head, ...body]} of figure.querySelectorAll('table')) {
    [...head.cells].forEach(({textContent: name}, i) => {
      const end = i + (head.cells[i + 1]?.textContent === 'least' ? 3 : 1);
      const cells = row => [row.cells[0], ...[...row.cells].slice(i, end)].map(cell => cell.textContent);
      if (i && !columns.has(name)) columns.set(name, body.map(cells));
    });
  }
  const points = ({lastChild, dataset: {name}, attributes}) =>
    [...lastChild.getAttribute('d').matchAll(/(-?[\d.]+) (-?[\d.]+)/g)].map(([, x, y], i) =>
      ({x: +x, y: +y, name, kind: attributes.class.value, row: columns.get(name)[i]}));
  const shown = () => [...svg.querySelectorAll('g[data-name]')]
    .filter(curve => getComputedStyle(curve.parentNode).display !== 'none').map(points);
  const cursor = add(svg, 'g'), tip = add(figure, 'div', {class: 'tip', role: 'status', hidden: ''});
  let at = null;
  const hide = () => { at = null; tip.hidden = true; cursor.replaceChildren(); };
  const show = place => {
    const found = shown().map(curve => nearest(curve, place)), first = nearest(found, place);
    hide();
    tip.replaceChildren();
    tip.hidden = false;
    at = first.x;
    add(cursor, 'path', {class: 'rule cursor', d: `M${at} 10V204`});
    add(tip, 'b', {}, `${svg.dataset.x} ${first.row[0]}`);
    for (const {x, y, name, kind, row: [step, value, ...range]} of found) {
      add(cursor, 'path', {class: `marks ${kind}`, d: `M${x} ${y}h0`});
      const spread = range.length ? ` (${range.join(' to ')})` : '';
      add(tip, 'span', {class: kind}, `${name}: ${value}${spread}${step === first.row[0] ? '' : ` at ${step}`}`);
    }
    const [box, outer] = [svg, figure].map(element => element.getBoundingClientRect());
    const left = box.left - outer.left + at / svg.viewBox.baseVal.width * box.width, width = tip.offsetWidth;
    tip.style.left = `${Math.max(0, left + width + 20 < outer.width ? left + 12 : left - width - 12)}px`;
    const below = tip.offsetHeight > box.height / 2;  // where it would hide the curves
    tip.style.top = `${(below ? box.bottom : box.top + 8) - outer.top}px`;
  };
  const pointed = ({clientX}) => {
    const {left, width} = svg.getBoundingClientRect();
    show((clientX - left) / width * svg.viewBox.baseVal.width);
  };
  const pressed = event => {
    const xs = shown().flat().map(({x}) => x).sort((a, b) => a - b);
    const to = {Home: xs[0], End: xs.at(-1)};
    to.ArrowRight = xs.find(x => x > (at ?? -1)) ?? to.End;
    to.ArrowLeft = xs.findLast(x => x < (at ?? Infinity)) ?? to.Home;
    if (event.key === 'Escape') hide();
    if (!(event.key in to)) return;
    event.preventDefault();
    show(to[event.key]);
  };
  svg.tabIndex = 0;
  for (const kind of ['pointermove', 'pointerdown']) svg.addEventListener(kind, pointed);
  svg.addEventListener('pointerleave', ({pointerType}) => pointerType === 'mouse' && hide());
  svg.addEventListener('blur', hide);
  svg.addEventListener('keydown', pressed);
  figure.querySelector('.scale')?.addEventListener('change', hide);
}
