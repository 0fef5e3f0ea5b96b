"""HTTP over one model: OpenAI's, Anthropic's and llama-server's APIs, jobs, and a web page.

command.py reads the flags and runs uvicorn; app.py puts the parts together; holder.py holds the
model; answers.py runs requests on the scheduler; fields.py and faults.py check what clients send.
Each API has a file of its own.
"""
