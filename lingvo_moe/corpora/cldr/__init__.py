"""The default corpus: phrases said in 125 languages out of the CLDR data in Babel."""
