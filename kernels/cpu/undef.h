// Ends one inclusion of vec.h; no include guard on purpose.
#undef PT_W
#undef PT_F16C
#undef PT_TARGET_ATTR
#undef PT_FN
