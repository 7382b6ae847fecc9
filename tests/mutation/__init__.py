"""The mutation run: does a test fail when the code that it tests is changed? (`make mutation`)."""
