"""What the workshop's deck sets before its command."""

DECK = {
    "MODEL_SIZE_KEY": "GPT1_5B",
    "SEQ_LEN": "1024",
    "MICRO_BATCH": "1",
    "SP_TYPE": "megatron",
    "ZERO_STAGE": "1",
    "GAS": "1",
    "USE_FLASH_ATTN": "1",
}
