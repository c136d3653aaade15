"""An OpenAI-compatible server, whose requests share forward passes, with drafts.

api.py     what requests ask and what replies say, and what is wrong with a request
engine.py  the requests on one `Scheduler`, and the bridge from its threads to asyncio
app.py     the routes, and how the server starts and stops
page.html  a chat that colours accepted, recovered and bonus tokens
"""
