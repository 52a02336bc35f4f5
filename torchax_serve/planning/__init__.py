"""Plans models on hardware that need not be present: memory, exchange and speed bound (`planning.plan.make_plan`)."""
