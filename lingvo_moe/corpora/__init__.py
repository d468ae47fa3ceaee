"""Text that becomes a corpus: files of lines and documents, preparation, sampling, the CLDR corpus. Knows no model."""
