/* Sums, products and extremes of what the ranks have, as NCCL makes them. */
#include <immintrin.h>
#include <string.h>
#include "nccl.h"

enum { SCALED_SUMS = 64 };
static double factors[SCALED_SUMS]; /* of ncclRedOpCreatePreMulSum, used in turn: programs destroy them right after use */

size_t size_of(size_t number, int type) {
    static const int bytes[] = {1, 1, 4, 4, 8, 8, 2, 4, 8, 2, 1, 1};
    return number * bytes[type];
}

/* ---- 16 bits. The instructions of F16C, since C compilers for x86-64 have _Float16 only since 2022. */

static __attribute__((target("f16c"))) float half_to_float(uint16_t bits) { return _cvtsh_ss(bits); }
static __attribute__((target("f16c"))) uint16_t float_to_half(float value) { return _cvtss_sh(value, 0); }

static float bfloat_to_float(uint16_t bits) {
    uint32_t wide = (uint32_t)bits << 16;
    float value;
    memcpy(&value, &wide, sizeof value);
    return value;
}

static uint16_t float_to_bfloat(float value) {
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    if (value != value) return 0x7fff;
    return (uint16_t)((bits + 0x7fff + ((bits >> 16) & 1)) >> 16); /* to the nearest, ties to even */
}

/* ---- one rank's part after the other. 16 bits are rounded after each rank, as at each hop of NCCL's ring. */

#define SAME(value) (value)
#define COMBINE(stored, type, widen, narrow)                                          \
    for (size_t i = 0; i < number; i++) {                                             \
        type left = widen(((stored *)result)[i]), right = widen(((const stored *)part)[i]); \
        if (operation == PROD) left *= right;                                         \
        else if (operation == MAX || operation == MIN) left = (right > left) == (operation == MAX) ? right : left; \
        else left += right;                                                           \
        ((stored *)result)[i] = narrow(left);                                         \
    }

static void combine(void *result, const void *part, size_t number, int type, int operation) {
    switch (type) {
        case INT8: COMBINE(int8_t, int8_t, SAME, SAME) break;
        case UINT8: COMBINE(uint8_t, uint8_t, SAME, SAME) break;
        case INT32: COMBINE(int32_t, int32_t, SAME, SAME) break;
        case UINT32: COMBINE(uint32_t, uint32_t, SAME, SAME) break;
        case INT64: COMBINE(int64_t, int64_t, SAME, SAME) break;
        case UINT64: COMBINE(uint64_t, uint64_t, SAME, SAME) break;
        case FLOAT32: COMBINE(float, float, SAME, SAME) break;
        case FLOAT64: COMBINE(double, double, SAME, SAME) break;
        case FLOAT16: COMBINE(uint16_t, float, half_to_float, float_to_half) break;
        case BFLOAT16: COMBINE(uint16_t, float, bfloat_to_float, float_to_bfloat) break;
    }
}

/* ---- averages and scaled sums: each rank's part is multiplied first, as in NCCL; a sum of integers is divided */

static void scale(void *part, size_t number, int type, double factor) {
    for (size_t i = 0; i < number; i++) switch (type) {
        case INT32: ((int32_t *)part)[i] *= factor; break;
        case INT64: ((int64_t *)part)[i] *= factor; break;
        case FLOAT32: ((float *)part)[i] *= (float)factor; break;
        case FLOAT64: ((double *)part)[i] *= factor; break;
        case FLOAT16: ((uint16_t *)part)[i] = float_to_half(half_to_float(((uint16_t *)part)[i]) * (float)factor); break;
        case BFLOAT16: ((uint16_t *)part)[i] = float_to_bfloat(bfloat_to_float(((uint16_t *)part)[i]) * (float)factor); break;
    }
}

EXPORT int ncclRedOpCreatePreMulSum(int *made, void *scalar, int type, int residence, struct communicator *comm) {
    static int number;
    int index = __atomic_fetch_add(&number, 1, __ATOMIC_RELAXED) % SCALED_SUMS;
    factors[index] = type == FLOAT32   ? *(float *)scalar
                     : type == FLOAT64 ? *(double *)scalar
                     : type == FLOAT16 ? half_to_float(*(uint16_t *)scalar)
                                       : bfloat_to_float(*(uint16_t *)scalar);
    return *made = FIRST_SCALED_SUM + index, SUCCESS;
}

EXPORT int ncclRedOpDestroy(int operation, struct communicator *comm) { return SUCCESS; }

void reduce(char *parts, size_t stride, int ranks, size_t number, int type, int operation) {
    double factor = operation >= FIRST_SCALED_SUM ? factors[operation - FIRST_SCALED_SUM] : operation == AVG ? 1.0 / ranks : 1;
    int is_integer = type < FLOAT16;
    for (int rank = 0; rank < ranks; rank++) {
        if (factor != 1 && !is_integer) scale(parts + rank * stride, number, type, factor);
        if (rank) combine(parts, parts + rank * stride, number, type, operation);
    }
    if (factor != 1 && is_integer) scale(parts, number, type, factor);
}
