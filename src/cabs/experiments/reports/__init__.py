"""From runs to selections, tables, figures and one interactive page."""
