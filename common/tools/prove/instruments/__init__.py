"""What single checks observe besides the usual records; see `common.tools.prove.session`."""
