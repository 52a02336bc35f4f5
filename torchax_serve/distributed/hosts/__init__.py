"""Model on several hosts: followers repeat each program of the leader in lock-step.

`Hosts` says who is who; `join` has all hosts find and check each other; `Leader` is the leader's side of the channel,
`Follower` the others'; `watch` ends the run where a host is lost.
"""
