"""What a person types and sees in a notebook: magics, output, panel, figures."""
