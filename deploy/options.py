"""The options as the README shows them."""

from espalier.cluster.options import OPTIONS


def markdown_table() -> str:
    """The table of options in the README."""
    rows = ["| option | default | |", "| --- | --- | --- |"]
    for option in OPTIONS:
        default = "" if option.default is None else str(option.default).lower()
        rows.append(f"| `{option.flag}` | {default and f'`{default}`'} | {option.help} |")
    return "\n".join(rows)
