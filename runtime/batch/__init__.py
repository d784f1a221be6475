"""A file of requests, answered into a file of replies, in the format of OpenAI's batches.

    requests     the input, checked line by line before anything runs, and the order in which it is answered
    results      the output, which is also the record of what is done: opened, held against the input, appended to
    senders      who answers: a server at a URL, or the server's own application in this process, without HTTP
    work         so many at a time, with patience where the answerer is busy
    arguments, command                                                                   `edgeinfer batch`
"""
