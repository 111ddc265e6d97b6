"""Questions and answers: configs, result tables, figures and the report."""
