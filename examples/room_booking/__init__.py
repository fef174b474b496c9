"""An agent that books meeting rooms, whose prompt is tuned by APO or GEPA."""
