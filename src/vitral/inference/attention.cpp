// softmax(Q K^T / sqrt(d)) V for every head of every image, in fp32. Compiled and called by native.py.
//
// N tokens, h heads, d = D / h. A head's scores for ROWS queries at a time stay in the cache from the first product to
// the second. Written with the vectors of gcc, W numbers each, so that one text serves every processor.

#include <omp.h>

#include <cmath>
#include <cstdint>

#if defined(__AVX512F__)
constexpr int W = 16, REGISTERS = 32;
#elif defined(__AVX__)
constexpr int W = 8, REGISTERS = 16;
#elif defined(__aarch64__)
constexpr int W = 4, REGISTERS = 32;
#else
constexpr int W = 4, REGISTERS = 16;
#endif
constexpr int ROWS = 6, VECTORS = REGISTERS == 32 ? 4 : 2;  // of a block of a product, which stays in the registers
constexpr long WIDE = VECTORS * W;

typedef float vec __attribute__((vector_size(4 * W)));
typedef float anywhere __attribute__((vector_size(4 * W), aligned(4)));
typedef int32_t ivec __attribute__((vector_size(4 * W)));

static inline vec load(const float* p) { return *(const anywhere*)p; }
static inline void store(float* p, vec v) { *(anywhere*)p = v; }
static inline long least(long a, long b) { return a < b ? a : b; }
static inline long whole_vectors(long n) { return (n + W - 1) / W * W; }

// A block of a product, C (m, n W) = A (m, k) B (k, n W); a, b and c numbers lie between their rows.
template <int m, int n>
static void block(const float* A, long a, const float* B, long b, long k, float* C, long c) {
  vec sum[m][n];
#pragma GCC unroll 8
  for (int i = 0; i < m; i++)
#pragma GCC unroll 8
    for (int j = 0; j < n; j++) sum[i][j] = vec{};
  for (long p = 0; p < k; p++) {
    vec row[n];
#pragma GCC unroll 8
    for (int j = 0; j < n; j++) row[j] = load(B + p * b + j * W);
#pragma GCC unroll 8
    for (int i = 0; i < m; i++)
#pragma GCC unroll 8
      for (int j = 0; j < n; j++) sum[i][j] += A[i * a + p] * row[j];
  }
#pragma GCC unroll 8
  for (int i = 0; i < m; i++)
#pragma GCC unroll 8
    for (int j = 0; j < n; j++) store(C + i * c + j * W, sum[i][j]);
}

// The same for numbers m <= ROWS and n <= VECTORS that are known only now.
template <int m = ROWS, int n = VECTORS>
static void product(int rows, int vectors, const float* A, long a, const float* B, long b, long k, float* C, long c) {
  if constexpr (m > 1)
    if (rows < m) return product<m - 1, n>(rows, vectors, A, a, B, b, k, C, c);
  if constexpr (n > 1)
    if (vectors < n) return product<m, n - 1>(rows, vectors, A, a, B, b, k, C, c);
  block<m, n>(A, a, B, b, k, C, c);
}

// 2^x for x <= 0: 2^n by the bits of the exponent, times 2^f by its series, f within 1/2 of 0. Below -126 it stays there.
static inline vec exp2_of(vec x) {
  const vec smallest = vec{} - 126.0f;
  x = x < smallest ? smallest : x;
  const float round = 12582912.0f;  // 1.5 * 2^23: what is added to it loses its fraction
  const vec t = x + round, f = x - (t - round);
  vec y = f * 1.5403530e-4f + 1.3333558e-3f;
  y = y * f + 9.6181291e-3f;
  y = y * f + 5.5504109e-2f;
  y = y * f + 2.4022651e-1f;
  y = y * f + 6.9314718e-1f;
  y = y * f + 1.0f;
  return x == x ? (vec)((ivec)y + ((ivec)t << 23)) : x;  // what is no number stays none
}

// e^(s - max s) of N scores times `scale`, in place; returns 1 / their sum.
static inline float soften(float* s, long N, float scale) {
  const long padded = whole_vectors(N);
  for (long j = N; j < padded; j++) s[j] = -INFINITY;
  vec most = load(s), sum = vec{};
  for (long j = W; j < padded; j += W) {
    const vec x = load(s + j);
    most = x > most ? x : most;
  }
  float top = most[0], total = 0;
  for (int i = 1; i < W; i++) top = most[i] > top ? most[i] : top;
  const float log2_e = 1.44269504f;
  for (long j = 0; j < padded; j += W) {
    const vec e = exp2_of((load(s + j) - top) * (scale * log2_e));
    store(s + j, e);
    sum += e;
  }
  for (int i = 0; i < W; i++) total += sum[i];
  return 1 / total;
}

// One head: rows of q, k and v are `stride` apart, those of `out` `next`; `room` is for K^T, V and the scores.
static void look(const float* q, const float* k, const float* v, long stride, float* out, long next, long N, long d,
                 float* room) {
  const long padded = whole_vectors(N);
  float *K_T = room, *V = K_T + padded * d, *scores = V + padded * d;
  for (long j = 0; j < N; j++)
    for (long x = 0; x < d; x += W) store(V + j * d + x, load(v + j * stride + x));
  for (long first = 0; first < padded; first += WIDE) {  // a panel (d, keys) for each block of keys
    const long keys = least(padded - first, WIDE);
    for (long x = 0; x < d; x++)
      for (long j = 0; j < keys; j++)
        K_T[first * d + x * keys + j] = first + j < N ? k[(first + j) * stride + x] : 0;
  }
  for (long i = 0; i < N; i += ROWS) {
    const int rows = least(N - i, ROWS);
    for (long first = 0; first < padded; first += WIDE) {
      const long keys = least(padded - first, WIDE);
      product(rows, keys / W, q + i * stride, stride, K_T + first * d, keys, d, scores + first, padded);
    }
    float share[ROWS];
    for (int r = 0; r < rows; r++) share[r] = soften(scores + r * padded, N, 1 / std::sqrt((float)d));
    for (long x = 0; x < d; x += WIDE)
      product(rows, least(d - x, WIDE) / W, scores, padded, V + x, d, N, out + i * next + x, next);
    for (int r = 0; r < rows; r++)
      for (long x = 0; x < d; x += W) {
        float* o = out + (i + r) * next + x;
        store(o, load(o) * share[r]);
      }
  }
}

extern "C" {

// What d must be a multiple of.
int multiple_of() { return W; }

// How many numbers of scratch memory each thread needs.
long room_of(long N, long d) { return (2 * d + ROWS) * whole_vectors(N); }

// (B, N, 3 h d) -> (B, N, h d): the heads side by side; `rooms` is scratch memory for each of the threads.
void attention(const float* qkv, float* out, float* rooms, long B, long N, long h, long d, int threads) {
  const long D = h * d;
#pragma omp parallel for num_threads(threads)
  for (long head = 0; head < B * h; head++) {
    const long image = head / h, at = head % h * d;
    const float* q = qkv + image * N * 3 * D + at;
    float* room = rooms + omp_get_thread_num() * room_of(N, d);
    look(q, q + D, q + 2 * D, 3 * D, out + image * N * D + at, D, N, d, room);
  }
}
}
