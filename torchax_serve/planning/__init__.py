"""Whether a model fits on hardware that need not be there, and what bounds its speed: `planning.plan.make_plan`."""
