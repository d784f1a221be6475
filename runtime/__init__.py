"""The runtime: one engine, several backends below it, any number of readers above it.

Layers, each importing only those to its left::

    values, backend (the seam) <- sampling, detokenizer, stops, chat_format, sequence, slots, scheduler <- engine <- stream, service <- load
                               <- backends/*  (only load.py knows them by name)
"""
