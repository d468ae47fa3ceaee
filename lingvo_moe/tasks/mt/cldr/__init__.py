"""The default corpus: phrases said in about 100 languages out of the CLDR data in Babel."""
