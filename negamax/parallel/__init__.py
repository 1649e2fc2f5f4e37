"""The rank grid (layout, pure arithmetic) and the process groups that carry tensors between ranks
(context).
"""
