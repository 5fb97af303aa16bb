"""The report of a run as one HTML file.

`aiockpt.monitor.html.html_report` gathers its figures and writes it; `templates/` has the page, its style and its scripts.
"""
