"""The planner in a job: what it is asked, how ranks agree on its plan, and the plan's file."""
