"""A plan as one self-contained HTML page, so that a notebook can show it: text in, text out."""
