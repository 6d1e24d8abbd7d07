"""How expected values come to be: one numpy oracle a spec, in float64 or integers."""
