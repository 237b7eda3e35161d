"""The planner in a job: its request, how ranks agree on its plan, and the plan's file."""
