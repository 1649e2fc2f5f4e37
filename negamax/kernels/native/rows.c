/* Row-wise ops for the CPU: the arithmetic of negamax/kernels/<family>/op.py in one pass over
   each row.

   This file is compiled once per dtype of the tensors: bf16, or fp32 with -DELEMENT_FP32. Sums run
   over 16 fixed lanes, so a row's result depends only on that row. bf16 is stored as uint16_t and
   rounded to nearest even where the references round. Tensors are contiguous. Sizes are in
   elements. */

#include <float.h>
#include <math.h>
#include <stdint.h>
#include <string.h>

#define LANES 16
#define WIDTH 8
#ifdef ELEMENT_FP32
typedef float element;
#else
typedef uint16_t element; /* bf16 */
#endif
typedef float vec __attribute__((vector_size(4 * WIDTH)));

static inline vec load(const float *x) {
    vec out;
    memcpy(&out, x, sizeof out);
    return out;
}

static inline void store(float *x, vec value) { memcpy(x, &value, sizeof value); }

static inline float across(vec v) {
    return ((v[0] + v[4]) + (v[2] + v[6])) + ((v[1] + v[5]) + (v[3] + v[7]));
}

#ifdef ELEMENT_FP32
static const float LARGEST = FLT_MAX;

static inline float widen(element value) { return value; }

static inline element narrow(float value) { return value; }
#else
static const float LARGEST = 0x1.fep127f;

static inline float widen(element value) {
    uint32_t bits = (uint32_t)value << 16;
    float out;
    memcpy(&out, &bits, sizeof out);
    return out;
}

static inline element narrow(float value) {
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
    return (element)((bits & 0x7fffffffu) > 0x7f800000u ? 0x7fc0u : rounded); /* NaN stays NaN */
}
#endif

static inline float fold(const float *lanes) {
    float part[LANES];
    memcpy(part, lanes, sizeof part);
    for (int step = LANES / 2; step; step /= 2)
        for (int i = 0; i < step; i++) part[i] += part[i + step];
    return part[0];
}

static inline float total(const float *x, int64_t count) {
    float lanes[LANES] = {0};
    int64_t i = 0;
    for (; i + LANES <= count; i += LANES)
        for (int j = 0; j < LANES; j++) lanes[j] += x[i + j];
    for (int j = 0; i < count; i++, j++) lanes[j] += x[i];
    return fold(lanes);
}

static inline float largest(const float *x, int64_t count, float floor) {
    for (int64_t i = 0; i < count; i++) floor = x[i] > floor ? x[i] : floor;
    return floor;
}

static float sum_of_squares(const float *x, int64_t count) {
    float lanes[LANES] = {0};
    int64_t i = 0;
    for (; i + LANES <= count; i += LANES)
        for (int j = 0; j < LANES; j++) lanes[j] += x[i + j] * x[i + j];
    for (int j = 0; i < count; i++, j++) lanes[j] += x[i] * x[i];
    return fold(lanes);
}

/* Compute exp to about 2 ulp, in a form that compilers vectorize. x is clamped, so results are in
   the range of float; NaN stays NaN. */
static inline float exponential(float x) {
    x = x < -87.0f ? -87.0f : x > 88.0f ? 88.0f : x;
    float n = x == x ? floorf(x * 1.44269504088896341f + 0.5f) : 0.0f;
    float r = (x - n * 0.693359375f) + n * 2.12194440e-4f;
    float p = 1.9875691500e-4f;
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    uint32_t bits = (uint32_t)((int32_t)n + 127) << 23;
    float scale;
    memcpy(&scale, &bits, sizeof scale);
    return p * scale;
}

/* residual += x (x may be NULL), then out = rms_norm(residual) * weight, or * (1 + weight).
   x, residual and out are [rows, width]. */
void negamax_add_rms(const element *x, element *residual, const element *weight, element *out,
                     int64_t rows, int64_t width, float eps, int64_t gemma) {
    float scratch[width];
    for (int64_t row = 0; row < rows; row++) {
        element *restrict sum = residual + row * width;
        element *restrict y = out + row * width;
        if (x) {
            const element *restrict add = x + row * width;
            for (int64_t i = 0; i < width; i++) sum[i] = narrow(widen(sum[i]) + widen(add[i]));
        }
        for (int64_t i = 0; i < width; i++) scratch[i] = widen(sum[i]);
        float scale = 1.0f / sqrtf(sum_of_squares(scratch, width) / (float)width + eps);
        if (gemma)
            for (int64_t i = 0; i < width; i++)
                y[i] = narrow(scratch[i] * scale * (1.0f + widen(weight[i])));
        else
            for (int64_t i = 0; i < width; i++)
                y[i] = narrow(widen(narrow(scratch[i] * scale)) * widen(weight[i]));
    }
}

/* Normalize `count` values by their mean square and multiply them by `weight`. */
static void scaled(float *restrict x, const float *restrict weight, int64_t count, float eps) {
    float scale = 1.0f / sqrtf(sum_of_squares(x, count) / (float)count + eps);
    for (int64_t i = 0; i < count; i++) x[i] = x[i] * scale * weight[i];
}

/* Norm and rotate qkv [tokens, (heads + 2 kv_heads) * dim]. Write q_out [tokens, heads * dim], and
   keys and values to the caches at rows [tokens * kv_heads]. cos, sin [tokens, rotary] fp32. All
   values become finite first, because another sequence may use the cache block later. */
void negamax_qk_norm_rope_write(const element *qkv, const float *weight, const float *cosines,
                                const float *sines, element *k_cache, element *v_cache,
                                const int64_t *rows, element *q_out, int64_t tokens, int64_t heads,
                                int64_t kv_heads, int64_t dim, int64_t rotary, float eps) {
    int64_t q_width = heads * dim, kv_width = kv_heads * dim, width = q_width + 2 * kv_width;
    int64_t half = rotary / 2;
    float scratch[width];
    for (int64_t token = 0; token < tokens; token++) {
        const element *source = qkv + token * width;
        for (int64_t i = 0; i < width; i++) {
            float value = widen(source[i]);
            value = value != value ? 0.0f : value;
            scratch[i] = value > LARGEST ? LARGEST : value < -LARGEST ? -LARGEST : value;
        }
        scaled(scratch, weight, q_width, eps);
        scaled(scratch + q_width, weight + q_width, kv_width, eps);
        const float *c = cosines + token * rotary, *s = sines + token * rotary;
        for (int64_t head = 0; head < heads + kv_heads; head++) {
            float *x = scratch + head * dim;
            for (int64_t i = 0; i < half; i++) {
                float low = x[i], high = x[i + half];
                x[i] = low * c[i] + high * s[i];
                x[i + half] = high * c[i + half] + low * s[i + half];
            }
        }
        element *q = q_out + token * q_width;
        for (int64_t i = 0; i < q_width; i++) q[i] = narrow(scratch[i]);
        for (int64_t head = 0; head < kv_heads; head++) {
            const float *key = scratch + q_width + head * dim, *value = key + kv_width;
            int64_t offset = rows[token * kv_heads + head] * dim;
            element *k = k_cache + offset, *v = v_cache + offset;
            for (int64_t i = 0; i < dim; i++) k[i] = narrow(key[i]);
            for (int64_t i = 0; i < dim; i++) v[i] = narrow(value[i]);
        }
    }
}

/* Do negamax_qk_norm_rope_write with a norm per head; weight [2, dim] of queries and of keys. With
   an index cache, `projected` also has index_heads index queries and one index key of index_dim
   columns, with norms index_weight [2, index_dim]. The index key has the block and offset of the
   token's first key. Rank `rank` of `ranks` writes only blocks b with b % ranks = rank, as its
   block b / ranks. */
void negamax_head_norm_rope_write(const element *projected, const float *weight,
                                  const float *index_weight, const float *cosines,
                                  const float *sines, element *k_cache, element *v_cache,
                                  element *index_cache, const int64_t *rows, element *q_out,
                                  element *index_q_out, int64_t tokens, int64_t heads,
                                  int64_t kv_heads, int64_t dim, int64_t index_dim, int64_t rotary,
                                  int64_t block_size, float eps, int64_t index_heads,
                                  int64_t rank, int64_t ranks) {
    int64_t of_indexer = index_cache ? index_heads + 1 : 0, half = rotary / 2;
    int64_t all = heads + 2 * kv_heads, width = all * dim + of_indexer * index_dim;
    float x[dim > index_dim ? dim : index_dim];
    for (int64_t token = 0; token < tokens; token++) {
        const element *source = projected + token * width;
        const float *c = cosines + token * rotary, *s = sines + token * rotary;
        const int64_t *row = rows + token * kv_heads;
        int64_t block = row[0] / (kv_heads * block_size), is_mine = block % ranks == rank;
        for (int64_t head = 0; head < all + of_indexer; head++) {
            int64_t of_index = head - all, size = of_index < 0 ? dim : index_dim;
            if (of_index == index_heads && !is_mine) continue;
            for (int64_t i = 0; i < size; i++) {
                float value = widen(source[i]);
                value = value != value ? 0.0f : value;
                x[i] = value > LARGEST ? LARGEST : value < -LARGEST ? -LARGEST : value;
            }
            source += size;
            element *to;
            if (of_index == index_heads)
                to = index_cache + (block / ranks * block_size + row[0] % block_size) * size;
            else if (of_index >= 0)
                to = index_q_out + (token * index_heads + of_index) * size;
            else if (head < heads)
                to = q_out + (token * heads + head) * size;
            else if (head < heads + kv_heads)
                to = k_cache + row[head - heads] * size;
            else
                to = v_cache + row[head - heads - kv_heads] * size;
            if (of_index >= 0 || head < heads + kv_heads) {
                const float *own = of_index >= 0 ? index_weight : weight;
                int64_t is_key = of_index >= 0 ? of_index == index_heads : head >= heads;
                scaled(x, own + is_key * size, size, eps);
                for (int64_t i = 0; i < half; i++) {
                    float low = x[i], high = x[i + half];
                    x[i] = low * c[i] + high * s[i];
                    x[i + half] = high * c[i + half] + low * s[i + half];
                }
            }
            for (int64_t i = 0; i < size; i++) to[i] = narrow(x[i]);
        }
    }
}

/* Compute the scores of fp32 keys [keys, dim] for four fp32 queries [4, dim], two keys at a time.
   `keys` is padded to an even number, and `dim` to a multiple of WIDTH. */
static void four_scores(const float *q, const float *k, float *scores, int64_t keys, int64_t dim,
                        int64_t stride) {
    for (int64_t key = 0; key < keys; key += 2) {
        const float *even = k + key * dim, *odd = even + dim;
        vec sum[4][2] = {{{0}}};
        for (int64_t i = 0; i < dim; i += WIDTH) {
            vec a = load(even + i), b = load(odd + i);
            for (int row = 0; row < 4; row++) {
                vec x = load(q + row * dim + i);
                sum[row][0] += x * a;
                sum[row][1] += x * b;
            }
        }
        for (int row = 0; row < 4; row++) {
            scores[row * stride + key] = across(sum[row][0]);
            scores[row * stride + key + 1] = across(sum[row][1]);
        }
    }
}

/* acc [4, dim] = acc * alpha [4] + p [4, keys] values [keys, dim]. */
static void four_mixed(float *acc, const float *alpha, const float *p, const float *values,
                       int64_t keys, int64_t dim, int64_t stride) {
    for (int64_t i = 0; i < dim; i += WIDTH) {
        vec sum[4];
        for (int row = 0; row < 4; row++) sum[row] = load(acc + row * dim + i) * alpha[row];
        for (int64_t key = 0; key < keys; key++) {
            vec value = load(values + key * dim + i);
            for (int row = 0; row < 4; row++) sum[row] += value * p[row * stride + key];
        }
        for (int row = 0; row < 4; row++) store(acc + row * dim + i, sum[row]);
    }
}

/* Convert `count` rows of `dim` values to fp32 rows of `padded` values; padding is not written. */
static void widen_rows(const element *restrict rows, float *restrict out, int64_t count,
                       int64_t dim, int64_t padded) {
    for (int64_t row = 0; row < count; row++)
        for (int64_t i = 0; i < dim; i++) out[row * padded + i] = widen(rows[row * dim + i]);
}

static void prefetch_block(const element *block, int64_t count) {
    const int64_t line = 64 / (int64_t)sizeof(element);
    for (int64_t i = 0; i < count; i += line) __builtin_prefetch(block + i);
}

/* Attend with one query per sequence to its paged keys and values, block by block with a running
   softmax: m_i is the largest score, l_i is the sum of exponentials, and alpha rescales l_i and the
   output if m_i grows. q, out [seqs, heads, dim]; caches [blocks, kv_heads, block_size, dim];
   tables [seqs, table_width] block numbers; lengths [seqs] keys. Padding: length and output 0. */
void negamax_decode(const element *q, const element *k_cache, const element *v_cache,
                    const int64_t *tables, const int64_t *lengths, element *out, int64_t seqs,
                    int64_t heads, int64_t kv_heads, int64_t dim, int64_t block_size,
                    int64_t table_width) {
    int64_t group = heads / kv_heads, rows = (group + 3) / 4 * 4, stride = (block_size + 1) / 2 * 2;
    int64_t padded = (dim + WIDTH - 1) / WIDTH * WIDTH, block_count = block_size * dim;
    float queries[rows * padded], acc[rows * padded], scores[rows * stride];
    float m_i[rows], l_i[rows], alpha[rows];
    float keys[stride * padded], values[stride * padded];
    const float scale = 1.0f / sqrtf((float)dim);
    memset(queries, 0, sizeof queries);
    memset(keys, 0, sizeof keys);
    memset(values, 0, sizeof values);
    for (int64_t pair = 0; pair < seqs * kv_heads; pair++) {
        int64_t sequence = pair / kv_heads, head = pair % kv_heads, length = lengths[sequence];
        const int64_t *table = tables + sequence * table_width;
        int64_t first_row = sequence * heads + head * group;
        widen_rows(q + first_row * dim, queries, group, dim, padded);
        for (int64_t i = 0; i < rows * padded; i++) queries[i] *= scale;
        memset(acc, 0, sizeof acc);
        for (int64_t row = 0; row < rows; row++) m_i[row] = -INFINITY, l_i[row] = 0.0f;
        for (int64_t start = 0; start < length; start += block_size) {
            int64_t offset = (table[start / block_size] * kv_heads + head) * block_count;
            int64_t count = length - start < block_size ? length - start : block_size;
            if (start + block_size < length) {
                int64_t next = (table[start / block_size + 1] * kv_heads + head) * block_count;
                prefetch_block(k_cache + next, block_count);
                prefetch_block(v_cache + next, block_count);
            }
            widen_rows(k_cache + offset, keys, count, dim, padded);
            widen_rows(v_cache + offset, values, count, dim, padded);
            for (int64_t row = 0; row < rows; row += 4)
                four_scores(queries + row * padded, keys, scores + row * stride,
                            (count + 1) / 2 * 2, padded, stride);
            for (int64_t row = 0; row < rows; row++) {
                float *p = scores + row * stride, top = largest(p, count, m_i[row]);
                for (int64_t key = 0; key < count; key++) p[key] = exponential(p[key] - top);
                alpha[row] = exponential(m_i[row] - top);
                l_i[row] = l_i[row] * alpha[row] + total(p, count);
                m_i[row] = top;
            }
            for (int64_t row = 0; row < rows; row += 4)
                four_mixed(acc + row * padded, alpha + row, scores + row * stride, values, count,
                           padded, stride);
        }
        for (int64_t row = 0; row < group; row++) {
            float divisor = length > 0 ? l_i[row] : 1.0f;
            for (int64_t i = 0; i < dim; i++)
                out[(first_row + row) * dim + i] = narrow(acc[row * padded + i] / divisor);
        }
    }
}

/* Score blocks: q [rows, heads, dim], index cache [blocks, 1, block_size, dim] -> out [rows, heads,
   width] fp32, the highest score in each of the first counts[row] sparse blocks of `size` keys. */
void negamax_block_scores(const element *q, const element *index_cache, const int64_t *tables,
                          const int64_t *counts, float *out, int64_t num_rows, int64_t heads,
                          int64_t dim, int64_t block_size, int64_t size, int64_t table_width,
                          int64_t width) {
    int64_t rows = (heads + 3) / 4 * 4, padded = (dim + WIDTH - 1) / WIDTH * WIDTH;
    int64_t stride = (size + 1) / 2 * 2;
    float queries[rows * padded], keys[stride * padded], scores[rows * stride];
    memset(queries, 0, sizeof queries);
    memset(keys, 0, sizeof keys);
    for (int64_t row = 0; row < num_rows; row++) {
        widen_rows(q + row * heads * dim, queries, heads, dim, padded);
        for (int64_t block = 0; block < counts[row]; block++) {
            int64_t first = block * size;
            int64_t slot = tables[row * table_width + first / block_size] * block_size;
            const element *stored = index_cache + (slot + first % block_size) * dim;
            widen_rows(stored, keys, size, dim, padded);
            for (int64_t head = 0; head < rows; head += 4)
                four_scores(queries + head * padded, keys, scores + head * stride, stride, padded,
                            stride);
            for (int64_t head = 0; head < heads; head++)
                out[(row * heads + head) * width + block] =
                    largest(scores + head * stride, size, -LARGEST);
        }
    }
}

/* Route x [tokens, hidden] with gate [experts, hidden] fp32 and bias [experts] fp32. ids [tokens,
   top_k] are the top_k experts of sigmoid(gate x) + bias; weights [tokens, top_k] are the sigmoids
   of these experts, divided by their sum. Of equal scores the lower id is selected. */
void negamax_route(const element *x, const float *gate, const float *bias, int32_t *ids,
                   float *weights, int64_t tokens, int64_t hidden, int64_t experts, int64_t top_k) {
    float wide[hidden], score[experts], biased[experts];
    for (int64_t token = 0; token < tokens; token++) {
        const element *source = x + token * hidden;
        for (int64_t i = 0; i < hidden; i++) wide[i] = widen(source[i]);
        for (int64_t expert = 0; expert < experts; expert++) {
            const float *row = gate + expert * hidden;
            float lanes[LANES] = {0};
            int64_t i = 0;
            for (; i + LANES <= hidden; i += LANES)
                for (int j = 0; j < LANES; j++) lanes[j] += wide[i + j] * row[i + j];
            for (int j = 0; i < hidden; i++, j++) lanes[j] += wide[i] * row[i];
            score[expert] = 1.0f / (1.0f + expf(-fold(lanes)));
            biased[expert] = score[expert] + bias[expert];
            /* NaN ranks first, as in torch.topk */
            if (biased[expert] != biased[expert]) biased[expert] = INFINITY;
        }
        float total = 0.0f;
        for (int64_t choice = 0; choice < top_k; choice++) {
            int64_t best = -1;
            for (int64_t expert = 0; expert < experts; expert++) {
                int taken = 0;
                for (int64_t earlier = 0; earlier < choice; earlier++)
                    taken |= ids[token * top_k + earlier] == expert;
                if (!taken && (best < 0 || biased[expert] > biased[best])) best = expert;
            }
            ids[token * top_k + choice] = (int32_t)best;
            total += weights[token * top_k + choice] = score[best];
        }
        for (int64_t choice = 0; choice < top_k; choice++) weights[token * top_k + choice] /= total;
    }
}

/* gate_up [rows, 2 * width], gate first -> out [rows, width] = g * sigmoid(alpha * g) * (u + beta),
   where g is clamped to at most `limit`, and u to -limit .. limit. With the constants of silu,
   silu(g) is rounded before the product. */
void negamax_swiglu(const element *gate_up, element *out, int64_t rows, int64_t width, float alpha,
                    float limit, float beta) {
    const int is_silu = alpha == 1.0f && isinf(limit) && beta == 0.0f;
    for (int64_t row = 0; row < rows; row++) {
        const element *restrict gate = gate_up + row * 2 * width, *restrict up = gate + width;
        element *restrict y = out + row * width;
        for (int64_t i = 0; i < width; i++) {
            float g = widen(gate[i]), u = widen(up[i]);
            g = g > limit ? limit : g;
            u = u > limit ? limit : u < -limit ? -limit : u;
            float swish = g / (1.0f + exponential(-alpha * g));
            y[i] = narrow((is_silu ? widen(narrow(swish)) : swish) * (u + beta));
        }
    }
}

/* Sort the (token, choice) pairs of experts first .. first + count - 1 by expert; pairs of one
   expert keep their order. Pair p of ids [tokens * top_k] is at place[p] of the sorted list (-1:
   another rank's expert). Entry i of the list belongs to token source[i]. Expert e has the entries
   bounds[e] .. bounds[e + 1] - 1. source, place [tokens * top_k]; bounds [count + 1]. */
void negamax_group_pairs(const int32_t *ids, int64_t *source, int64_t *place, int64_t *bounds,
                         int64_t tokens, int64_t top_k, int64_t first, int64_t count) {
    int64_t pairs = tokens * top_k, next[count + 1];
    memset(bounds, 0, sizeof(int64_t) * (size_t)(count + 1));
    for (int64_t pair = 0; pair < pairs; pair++)
        if (ids[pair] >= first && ids[pair] < first + count) bounds[ids[pair] - first + 1]++;
    for (int64_t expert = 0; expert < count; expert++) bounds[expert + 1] += bounds[expert];
    memcpy(next, bounds, sizeof next);
    for (int64_t pair = 0; pair < pairs; pair++) {
        place[pair] = -1;
        if (ids[pair] < first || ids[pair] >= first + count) continue;
        place[pair] = next[ids[pair] - first]++;
        source[place[pair]] = pair / top_k;
    }
}

/* Sum each token's expert outputs with weights, in the order of its choices. y [sorted pairs,
   hidden], weights [tokens * top_k] fp32, place of negamax_group_pairs -> out [tokens, hidden]. */
void negamax_combine(const element *y, const int64_t *place, const float *weights, element *out,
                     int64_t tokens, int64_t top_k, int64_t hidden) {
    float sum[hidden];
    for (int64_t token = 0; token < tokens; token++) {
        memset(sum, 0, sizeof sum);
        for (int64_t pair = token * top_k; pair < (token + 1) * top_k; pair++) {
            if (place[pair] < 0) continue;
            const element *source = y + place[pair] * hidden;
            for (int64_t i = 0; i < hidden; i++) sum[i] += weights[pair] * widen(source[i]);
        }
        for (int64_t i = 0; i < hidden; i++) out[token * hidden + i] = narrow(sum[i]);
    }
}
