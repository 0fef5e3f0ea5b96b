"""Above the engine: models, sessions, tools, jobs, and files of sessions."""
