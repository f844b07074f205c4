/* Matrix products are noted with their multiply-adds. Callers pass more arguments than are named here; in the x86-64
   calling convention a function may leave the last ones alone. */
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include "phantom.h"

enum { NOT_INITIALIZED = 1, EXECUTION_FAILED = 13 };

struct handle { void *stream; };

static int product(const char *name, const void *stream, long long m, long long n, long long k, long long batch) {
    struct graph *graph;
    if (begin_work(stream, &graph)) return EXECUTION_FAILED;
    stray_unless_covered(name, NULL);
    if (graph) {
        add_node(graph, (struct node){.kind = NODE_KERNEL});
        return 0;
    }
    one_operation_passes();
    note(GEMM, name, m * n * k * batch, stream, 0, 0);
    return 0;
}

EXPORT int cublasCreate_v2(struct handle **handle) {
    if (begin_unsafe_call()) return NOT_INITIALIZED; /* it allocates memory */
    *handle = calloc(1, sizeof **handle);
    return 0;
}

EXPORT int cublasDestroy_v2(struct handle *handle) {
    free(handle);
    return 0;
}

EXPORT int cublasSetStream_v2(struct handle *handle, void *stream) { return handle->stream = stream, 0; }
EXPORT int cublasSetWorkspace_v2(struct handle *handle, void *workspace, size_t size) { return 0; }
EXPORT int cublasGetMathMode(struct handle *handle, int *mode) { return *mode = 0, 0; }
EXPORT int cublasSetMathMode(struct handle *handle, int mode) { return 0; }
EXPORT int cublasGetPointerMode_v2(struct handle *handle, int *mode) { return *mode = 0, 0; }
EXPORT int cublasSetPointerMode_v2(struct handle *handle, int mode) { return 0; }

/* ---- cuBLAS: one macro per list of arguments */

#define GEMM_CALL(name)                                                              \
    EXPORT int name(struct handle *handle, int transa, int transb, int m, int n, int k) { \
        return product(#name, handle->stream, m, n, k, 1);                           \
    }
GEMM_CALL(cublasGemmEx)
GEMM_CALL(cublasSgemmEx)
GEMM_CALL(cublasSgemm_v2)
GEMM_CALL(cublasDgemm_v2)

EXPORT int cublasGemmStridedBatchedEx(struct handle *handle, int transa, int transb, int m, int n, int k, void *alpha,
                                      void *a, int a_type, int lda, long long a_stride, void *b, int b_type, int ldb,
                                      long long b_stride, void *beta, void *c, int c_type, int ldc, long long c_stride,
                                      int batch) {
    return product("cublasGemmStridedBatchedEx", handle->stream, m, n, k, batch);
}

#define STRIDED_CALL(name)                                                                                      \
    EXPORT int name(struct handle *handle, int transa, int transb, int m, int n, int k, void *alpha, void *a,   \
                    int lda, long long a_stride, void *b, int ldb, long long b_stride, void *beta, void *c,     \
                    int ldc, long long c_stride, int batch) {                                                   \
        return product(#name, handle->stream, m, n, k, batch);                                                  \
    }
STRIDED_CALL(cublasSgemmStridedBatched)
STRIDED_CALL(cublasDgemmStridedBatched)

#define BATCHED_CALL(name)                                                                                      \
    EXPORT int name(struct handle *handle, int transa, int transb, int m, int n, int k, void *alpha, void **a,  \
                    int lda, void **b, int ldb, void *beta, void **c, int ldc, int batch) {                     \
        return product(#name, handle->stream, m, n, k, batch);                                                  \
    }
BATCHED_CALL(cublasSgemmBatched)
BATCHED_CALL(cublasDgemmBatched)

#define GEMV_CALL(name) \
    EXPORT int name(struct handle *handle, int trans, int m, int n) { return product(#name, handle->stream, m, n, 1, 1); }
GEMV_CALL(cublasSgemv_v2)
GEMV_CALL(cublasDgemv_v2)

#define DOT_CALL(name) \
    EXPORT int name(struct handle *handle, int n) { return product(#name, handle->stream, n, 1, 1, 1); }
DOT_CALL(cublasDotEx)
DOT_CALL(cublasSdot_v2)
DOT_CALL(cublasDdot_v2)

/* ---- cuBLASLt: the opaque structures belong to the caller (its *Init functions) or are made here */

enum { DESC_TRANSA = 3 };              /* CUBLASLT_MATMUL_DESC_TRANSA */
enum { LAYOUT_BATCH_COUNT = 5 };       /* CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT */

struct description { int transa; };
struct layout { uint64_t rows, columns; int batch; };
struct heuristic { uint64_t algorithm[8]; size_t workspace; int state; float waves; int reserved[4]; };

EXPORT int cublasLtCreate(void **handle) { return *handle = calloc(1, 8), 0; }

EXPORT int cublasLtDestroy(void *handle) {
    free(handle);
    return 0;
}

EXPORT size_t cublasLtGetVersion(void) { return 130100; }

EXPORT int cublasLtMatmulDescCreate(struct description **made, int compute_type, int scale_type) {
    return *made = calloc(1, sizeof **made), 0;
}

EXPORT int cublasLtMatmulDescDestroy(struct description *description) {
    free(description);
    return 0;
}

EXPORT int cublasLtMatmulDescSetAttribute(struct description *description, int attribute, const void *value, size_t size) {
    if (attribute == DESC_TRANSA) memcpy(&description->transa, value, sizeof description->transa);
    return 0;
}

EXPORT int cublasLtMatrixLayoutCreate(struct layout **made, int type, uint64_t rows, uint64_t columns, int64_t ld) {
    *made = malloc(sizeof **made);
    **made = (struct layout){rows, columns, 1};
    return 0;
}

EXPORT int cublasLtMatrixLayoutDestroy(struct layout *layout) {
    free(layout);
    return 0;
}

EXPORT int cublasLtMatrixLayoutSetAttribute(struct layout *layout, int attribute, const void *value, size_t size) {
    if (attribute == LAYOUT_BATCH_COUNT) memcpy(&layout->batch, value, sizeof layout->batch);
    return 0;
}

EXPORT int cublasLtMatmulPreferenceCreate(void **made) { return *made = calloc(1, 8), 0; }

EXPORT int cublasLtMatmulPreferenceDestroy(void *preference) {
    free(preference);
    return 0;
}

EXPORT int cublasLtMatmulPreferenceSetAttribute(void *preference, int attribute, const void *value, size_t size) { return 0; }

EXPORT int cublasLtMatmulAlgoGetHeuristic(void *handle, void *description, void *a, void *b, void *c, void *d,
                                          void *preference, int wanted, struct heuristic *results, int *found) {
    memset(results, 0, sizeof *results);
    return *found = 1, 0;
}

EXPORT int cublasLtMatmul(void *handle, struct description *description, void *alpha, void *a, struct layout *a_layout,
                          void *b, struct layout *b_layout, void *beta, void *c, struct layout *c_layout, void *d,
                          struct layout *d_layout, void *algorithm, void *workspace, size_t size, void *stream) {
    uint64_t k = description->transa ? a_layout->rows : a_layout->columns;
    return product("cublasLtMatmul", stream, d_layout->rows, d_layout->columns, k, d_layout->batch);
}
