"""The hall: the nouns every room shares. Imports no other room."""
