"""Who holds what (layout, pure arithmetic) and the process groups that carry tensors between ranks
(context).
"""
