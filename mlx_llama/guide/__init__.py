"""The model in the package, and the search of its pages."""
