"""timm's names of models: what they say that the weights do not, and the names under which plainvit writes.

config.json as timm writes it has the name of the architecture; heads and activation are in timm's code alone. A test
compares the table with the installed timm, name by name.
"""

from plainvit.weights.grids import refuse

# (activation, heads): names of the ViTs, DeiTs and hybrids of timm that plainvit reads; all have LayerNorm's 1e-6
_BY_SETTINGS = {
    ("gelu", 2): """
        test_vit test_vit2
    """,
    ("gelu", 3): """
        vit_tiny_patch16_224 vit_tiny_patch16_384 deit_tiny_distilled_patch16_224 deit_tiny_patch16_224
        vit_tiny_r_s16_p8_224 vit_tiny_r_s16_p8_384
    """,
    ("gelu", 4): """
        vit_wee_patch16_reg1_gap_256
    """,
    ("gelu", 5): """
        vit_little_patch16_reg1_gap_256 vit_little_patch16_reg4_gap_256
    """,
    ("gelu", 6): """
        flexivit_small vit_small_patch8_224 vit_small_patch14_dinov2 vit_small_patch14_reg4_dinov2
        vit_small_patch16_36x1_224 vit_small_patch16_224 vit_small_patch16_384 vit_small_patch32_224
        vit_small_patch32_384 deit3_small_patch16_224 deit3_small_patch16_384
        deit_small_distilled_patch16_224 deit_small_patch16_224 vit_small_r26_s32_224 vit_small_r26_s32_384
    """,
    ("gelu", 8): """
        vit_medium_patch16_reg1_gap_256 vit_medium_patch16_reg4_gap_256 vit_mediumd_patch16_reg4_gap_256
        vit_mediumd_patch16_reg4_gap_384 deit3_medium_patch16_224
    """,
    ("gelu", 10): """
        vit_betwixt_patch16_reg1_gap_256 vit_betwixt_patch16_reg4_gap_256 vit_betwixt_patch16_reg4_gap_384
    """,
    ("gelu", 12): """
        flexivit_base vit_base_patch8_224 vit_base_patch14_dinov2 vit_base_patch14_reg1_tipsv2
        vit_base_patch14_reg4_dinov2 vit_base_patch16_224 vit_base_patch16_384 vit_base_patch16_reg4_gap_256
        vit_base_patch16_siglip_224 vit_base_patch16_siglip_256 vit_base_patch16_siglip_384
        vit_base_patch16_siglip_512 vit_base_patch16_siglip_gap_224 vit_base_patch16_siglip_gap_256
        vit_base_patch16_siglip_gap_384 vit_base_patch16_siglip_gap_512 vit_base_patch32_224
        vit_base_patch32_384 deit3_base_patch16_224 deit3_base_patch16_384 deit_base_distilled_patch16_224
        deit_base_distilled_patch16_384 deit_base_patch16_224 deit_base_patch16_384 vit_base_r26_s32_224
        vit_base_r50_s16_224 vit_base_r50_s16_384
    """,
    ("gelu", 14): """
        vit_base_patch16_plus_240 vit_base_patch32_plus_256 vit_so150m_patch16_reg4_gap_256
        vit_so150m_patch16_reg4_gap_384 vit_so150m_patch16_reg4_map_256
    """,
    ("gelu", 16): """
        eva_large_patch14_196 eva_large_patch14_336 flexivit_large vit_large_patch14_224
        vit_large_patch14_dinov2 vit_large_patch14_reg1_tipsv2 vit_large_patch14_reg4_dinov2
        vit_large_patch16_224 vit_large_patch16_384 vit_large_patch16_siglip_256
        vit_large_patch16_siglip_384 vit_large_patch16_siglip_gap_256 vit_large_patch16_siglip_gap_384
        vit_large_patch32_224 vit_large_patch32_384 deit3_large_patch16_224 deit3_large_patch16_384
        vit_large_r50_s32_224 vit_large_r50_s32_384 vit_so400m_patch14_reg1_tipsv2
        vit_so400m_patch14_siglip_224 vit_so400m_patch14_siglip_378 vit_so400m_patch14_siglip_384
        vit_so400m_patch14_siglip_gap_224 vit_so400m_patch14_siglip_gap_378
        vit_so400m_patch14_siglip_gap_384 vit_so400m_patch14_siglip_gap_448
        vit_so400m_patch14_siglip_gap_896 vit_huge_patch14_224 vit_huge_patch14_gap_224
        vit_huge_patch16_gap_448 deit3_huge_patch14_224 vit_giant_patch14_224 vit_giant_patch16_gap_224
        vit_gigantic_patch14_224 vit_base_patch16_gap_224
    """,
    ("gelu_tanh", 12): """
        vit_base_patch32_siglip_256 vit_base_patch32_siglip_gap_256
    """,
    ("gelu_tanh", 16): """
        vit_large_patch16_siglip_512 vit_large_patch16_siglip_gap_512 vit_so400m_patch16_siglip_256
        vit_so400m_patch16_siglip_384 vit_so400m_patch16_siglip_512 vit_so400m_patch16_siglip_gap_256
        vit_so400m_patch16_siglip_gap_384 vit_so400m_patch16_siglip_gap_512 vit_giantopt_patch16_siglip_256
        vit_giantopt_patch16_siglip_384 vit_giantopt_patch16_siglip_gap_256
        vit_giantopt_patch16_siglip_gap_384
    """,
}
ARCHITECTURES: dict[str, tuple[str, int]] = {
    name: settings for settings, names in _BY_SETTINGS.items() for name in names.split()
}
# Names whose weights may look like a plain ViT's: what these are
UNSUPPORTED = {
    "test_vit3": "a ViT with attention pooling over all tokens",
    "rope": "a ViT with rotary positions",
    "dinov3": "a ViT with rotary positions",
}
# (units of each stage, width), (units, widening): the names to write
HYBRIDS: dict[tuple[tuple[int, ...], int], str] = {
    ((), 192): "vit_tiny_r_s16_p8_224",
    ((2, 2, 2, 2), 384): "vit_small_r26_s32_224",
    ((3, 4, 9), 768): "vit_base_r50_s16_224",
    ((3, 4, 6, 3), 1024): "vit_large_r50_s32_224",
}
RESNETS: dict[tuple[tuple[int, ...], int], str] = {
    ((3, 4, 6, 3), 1): "resnetv2_50x1_bit",
    ((3, 4, 6, 3), 3): "resnetv2_50x3_bit",
    ((3, 4, 23, 3), 1): "resnetv2_101x1_bit",
    ((3, 4, 23, 3), 3): "resnetv2_101x3_bit",
    ((3, 8, 36, 3), 2): "resnetv2_152x2_bit",
    ((3, 8, 36, 3), 4): "resnetv2_152x4_bit",
}


def refuse_unknown(architecture: str) -> None:
    """A name whose heads, activation and positions plainvit does not know is not guessed at; "" is no name."""
    if not architecture or architecture in ARCHITECTURES or architecture in RESNETS.values():
        return
    what = next((what for part, what in UNSUPPORTED.items() if part in architecture), f"timm's {architecture}")
    raise refuse(what, f"architecture {architecture!r} in config.json")
