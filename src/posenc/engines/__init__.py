"""Engines run plans. An engine is a module with two functions and knows no encoding:

    refuses(q, k, v, plan, mask, dropout) -> str | None      why it cannot run this, or None
    run(q, k, v, plan, mask, dropout) -> [B, H, Lq, Dv]      q shifted and rotated already, as is k

`attend` imports them; nothing here imports an encoding.
"""
