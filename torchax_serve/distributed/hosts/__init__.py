"""One model on the devices of several hosts: the leader serves, followers repeat each of its programs in lock-step.

`Hosts` says who is who; `join` has all hosts find and check each other; `Leader` is the leader's side of the channel,
`Follower` the others'; `watch` ends the run where a host is lost.
"""
