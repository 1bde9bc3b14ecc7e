"""The lab: data, networks, recipes and commands that show what OCNOpt does. Nothing else imports it."""
