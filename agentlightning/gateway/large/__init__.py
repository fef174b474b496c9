"""Large requests: what takes long with them is done in a process of its own, and the event loop only passes bytes.

requests    what the gateway asks for, and the process that answers: started when first needed, restarted
work        what is done there; pure                      wire        the frames between the two
__main__    the process's entry
"""
