"""Plans of models on hardware that need not be present (`planning.plan.make_plan`).

A plan has memory, exchange and a bound on speed.
"""
