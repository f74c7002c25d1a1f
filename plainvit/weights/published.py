"""Published weights by name: model, recipe, data and image size in one word.

    plainvit weights          plainvit.load("vit_b16_augreg_i21k_i1k_224")

Addresses and licences are those in timm's and transformers' own tables (a test compares them with the installed
libraries). Accuracies are ImageNet top-1 and ReaL as timm's results files report them, with timm's evaluation; where
that was not at hand the field is empty.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Published:
    hub: str
    family: str
    licence: str
    top1: float | None = None
    real: float | None = None


def _timm(name: str, top1: float | None = None, real: float | None = None, licence: str = "apache-2.0") -> Published:
    return Published(f"timm/{name}", "timm", licence, top1, real)


PUBLISHED: dict[str, Published] = {
    # The paper's own: pre-trained on ImageNet-21k, fine-tuned on ImageNet
    "vit_b16_orig_i21k_i1k_224": _timm("vit_base_patch16_224.orig_in21k_ft_in1k", 81.78, 86.75),
    "vit_b16_orig_i21k_i1k_384": _timm("vit_base_patch16_384.orig_in21k_ft_in1k", 84.21, 88.40),
    "vit_l32_orig_i21k_i1k_384": _timm("vit_large_patch32_384.orig_in21k_ft_in1k", 81.51, 85.91),
    "vit_b16_orig_i21k_224": _timm("vit_base_patch16_224.orig_in21k"),
    "vit_l16_orig_i21k_224": _timm("vit_large_patch16_224.orig_in21k"),
    "vit_h14_orig_i21k_224": _timm("vit_huge_patch14_224.orig_in21k"),
    "r50_vit_b16_orig_i21k_i1k_384": _timm("vit_base_r50_s16_384.orig_in21k_ft_in1k", 84.99, 88.80),
    "vit_b16_google_i21k_i1k_224": Published("google/vit-base-patch16-224", "transformers", "see its hub page"),
    # AugReg ("How to train your ViT?")
    "vit_ti16_augreg_i21k_i1k_224": _timm("vit_tiny_patch16_224.augreg_in21k_ft_in1k"),
    "vit_s32_augreg_i21k_i1k_224": _timm("vit_small_patch32_224.augreg_in21k_ft_in1k"),
    "vit_s16_augreg_i21k_i1k_224": _timm("vit_small_patch16_224.augreg_in21k_ft_in1k"),
    "vit_b32_augreg_i21k_i1k_224": _timm("vit_base_patch32_224.augreg_in21k_ft_in1k"),
    "vit_b16_augreg_i21k_i1k_224": _timm("vit_base_patch16_224.augreg_in21k_ft_in1k", 84.53, 88.89),
    "vit_b16_augreg_i21k_i1k_384": _timm("vit_base_patch16_384.augreg_in21k_ft_in1k"),
    "vit_b8_augreg_i21k_i1k_224": _timm("vit_base_patch8_224.augreg_in21k_ft_in1k"),
    "vit_l16_augreg_i21k_i1k_224": _timm("vit_large_patch16_224.augreg_in21k_ft_in1k"),
    "vit_l16_augreg_i21k_i1k_384": _timm("vit_large_patch16_384.augreg_in21k_ft_in1k", 87.10, 90.22),
    "vit_b16_augreg_i21k_224": _timm("vit_base_patch16_224.augreg_in21k"),
    "vit_l16_augreg_i21k_224": _timm("vit_large_patch16_224.augreg_in21k"),
    "vit_b16_augreg_i1k_224": _timm("vit_base_patch16_224.augreg_in1k"),
    "vit_b16_sam_i1k_224": _timm("vit_base_patch16_224.sam_in1k"),
    "r_vit_ti16_augreg_i21k_i1k_224": _timm("vit_tiny_r_s16_p8_224.augreg_in21k_ft_in1k"),
    "r26_vit_s32_augreg_i21k_i1k_224": _timm("vit_small_r26_s32_224.augreg_in21k_ft_in1k"),
    "r50_vit_l32_augreg_i21k_i1k_384": _timm("vit_large_r50_s32_384.augreg_in21k_ft_in1k"),
    # BiT
    "bit_r50x1_i21k_i1k_448": _timm("resnetv2_50x1_bit.goog_in21k_ft_in1k", 80.39, 86.46),
    "bit_r101x1_i21k_i1k_448": _timm("resnetv2_101x1_bit.goog_in21k_ft_in1k"),
    "bit_r101x3_i21k_i1k_448": _timm("resnetv2_101x3_bit.goog_in21k_ft_in1k"),
    "bit_r152x2_i21k_i1k_448": _timm("resnetv2_152x2_bit.goog_in21k_ft_in1k"),
    "bit_r152x4_i21k_i1k_480": _timm("resnetv2_152x4_bit.goog_in21k_ft_in1k", 84.94, 88.57),
    # DeiT and DeiT III
    "deit_ti16_i1k_224": _timm("deit_tiny_patch16_224.fb_in1k"),
    "deit_s16_i1k_224": _timm("deit_small_patch16_224.fb_in1k"),
    "deit_b16_i1k_224": _timm("deit_base_patch16_224.fb_in1k", 81.98, 86.83),
    "deit_b16_distilled_i1k_224": _timm("deit_base_distilled_patch16_224.fb_in1k"),
    "deit3_s16_i1k_224": _timm("deit3_small_patch16_224.fb_in1k"),
    "deit3_b16_i1k_224": _timm("deit3_base_patch16_224.fb_in1k"),
    "deit3_l16_i21k_i1k_224": _timm("deit3_large_patch16_224.fb_in22k_ft_in1k"),
    # Self-supervised backbones, without a head
    "mae_b16_i1k_224": _timm("vit_base_patch16_224.mae", licence="cc-by-nc-4.0"),
    "mae_l16_i1k_224": _timm("vit_large_patch16_224.mae", licence="cc-by-nc-4.0"),
    "mae_h14_i1k_224": _timm("vit_huge_patch14_224.mae", licence="cc-by-nc-4.0"),
    "dino_s16_i1k_224": _timm("vit_small_patch16_224.dino"),
    "dino_b16_i1k_224": _timm("vit_base_patch16_224.dino"),
    "dinov2_s14_lvd142m_518": _timm("vit_small_patch14_dinov2.lvd142m"),
    "dinov2_b14_lvd142m_518": _timm("vit_base_patch14_dinov2.lvd142m"),
    "dinov2_l14_lvd142m_518": _timm("vit_large_patch14_dinov2.lvd142m"),
}
