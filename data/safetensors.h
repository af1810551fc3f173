/* safetensors.h: tensors by name in .safetensors files, read and written by byte range, so that every rank moves only
 * its own part.
 *
 *   SafeTensors* st = safetensors_open(path)       a file, an index, or a folder with model.safetensors or its index;
 *                                                  every header is checked whole, nothing else is read
 *   const SafeTensor* t = safetensors_find(st, name)       null without it; safetensors_get refuses instead
 *   safetensors_read_f32(st, t, first_elem, num_elems, out)      F32, F16, BF16 -> float
 *   safetensors_read_bytes(st, t, first_elem, num_elems, out)    as they are stored
 *   safetensors_close(st)
 *
 *   SafeTensors* st = safetensors_plan(path, tensors, n, max_file_bytes)   name, dtype, dims of each; touches no file
 *   safetensors_create_files(st)                   one rank: files at full length, headers, index
 *   safetensors_open_files(st)                     the others, after a barrier
 *   safetensors_write_f32 / _bytes(st, t, first_elem, num_elems, src)      any rank, any range, in any order. A value
 *                                                  that F16 or BF16 would make infinite is refused
 *                                                  where src is aligned to a page as the range is in the file, whole
 *                                                  pages go past the page cache
 *   safetensors_sync(st)                           to the disk; then safetensors_close
 *
 * A file is
 *   byte 0        8 bytes: length H of the header, little-endian
 *   byte 8        H bytes: a JSON object {"name": {"dtype": "F32", "shape": [2, 3], "data_offsets": [begin, end]}};
 *                 "__metadata__" may hold strings. H is a multiple of 8 in what we write, the end filled with spaces
 *   byte 8 + H    the tensors, row-major, little-endian; offsets count from here. They fill the file without hole
 *                 or overlap, down to its last byte
 * Written as the safetensors library writes (compact JSON, "__metadata__":{"format":"pt"} first, tensors by dtype and
 * then by name), so that a file saved by transformers and saved again by us has the same bytes.
 * More bytes than max_file_bytes are spread over NAME-00001-of-0000N.safetensors as huggingface_hub does it, in the
 * order given, and NAME.safetensors.index.json says in "weight_map" which file has which tensor. */
#pragma once
#include <sys/statvfs.h>
#include "json.h"

static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "tensors are read as they are stored in the file");

enum class SafeDtype {           // in the order of the library's files: wide before narrow
    U64, I64, F64, C64, F32, U32, I32, BF16, F16, U16, I16, F8_E8M0, F8_E4M3, F8_E5M2, I8, U8, F6_E3M2, F6_E2M3, F4,
    BOOL, COUNT
};

typedef struct {
    const char* name;
    size_t elem_bits;
} SafeDtypeInfo;

static const SafeDtypeInfo safe_dtypes[] = {
    {"U64", 64}, {"I64", 64}, {"F64", 64}, {"C64", 64}, {"F32", 32}, {"U32", 32}, {"I32", 32}, {"BF16", 16},
    {"F16", 16}, {"U16", 16}, {"I16", 16}, {"F8_E8M0", 8}, {"F8_E4M3", 8}, {"F8_E5M2", 8}, {"I8", 8}, {"U8", 8},
    {"F6_E3M2", 6}, {"F6_E2M3", 6}, {"F4", 4}, {"BOOL", 8},
};
static_assert(sizeof safe_dtypes / sizeof *safe_dtypes == (size_t)SafeDtype::COUNT, "one row per dtype");

#define SAFE_MAX_DIMS 8
#define SAFE_MAX_HEADER_BYTES ((size_t)100 * 1000 * 1000)      // the library's own limit
#define SAFE_DIRECT_BYTES ((size_t)4096)     // what bypasses the page cache starts and ends at multiples of this

typedef struct {
    const char* name;
    SafeDtype dtype;
    int num_dims;
    size_t dims[SAFE_MAX_DIMS];
    size_t num_elems, num_bytes; // follow from dtype and dims
    size_t file_idx, offset;     // where its first byte is, from the start of the file
} SafeTensor;

typedef struct {
    char* path;
    int fd;
    int direct_fd;               // files we write: past the page cache; -1 where the file system cannot
    size_t num_bytes;
    char* header;                // files we write: the 8 bytes of the length and the header
    size_t header_bytes;
} SafeFile;

typedef struct {
    char* path;                  // as the caller named it
    SafeTensor* tensors;         // sorted by name; names are owned
    size_t num_tensors;
    SafeFile* files;
    size_t num_files;
    char* index;                 // text of the index file of files we write, or null
    mutable size_t num_read_bytes;   // of tensors
} SafeTensors;

/* ---------------------------------------------------------------- 16-bit floats */

static inline float safe_float_of_bits(uint32_t bits)
{
    float x;
    memcpy(&x, &bits, 4);
    return x;
}

static inline float safe_float_of_f16(uint16_t half)
{
    uint32_t sign = (uint32_t)(half & 0x8000) << 16, exponent = half >> 10 & 31, mantissa = half & 0x3ff;
    if (exponent == 31) return safe_float_of_bits(sign | 0x7f800000 | mantissa << 13);
    if (exponent == 0) return (sign ? -1.0f : 1.0f) * ((float)mantissa * 0x1p-24f);     // zero and denormals
    return safe_float_of_bits(sign | (exponent + 112) << 23 | mantissa << 13);
}

/* Round to nearest, ties to even; NaN stays NaN, too large becomes Inf. */
static inline uint16_t safe_bf16_of_float(float x)
{
    uint32_t bits;
    memcpy(&bits, &x, 4);
    if (x != x) return (uint16_t)(bits >> 16 | 0x40);
    return (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

static inline uint16_t safe_f16_of_float(float x)
{
    uint32_t bits;
    memcpy(&bits, &x, 4);
    uint32_t sign = bits >> 16 & 0x8000, magnitude = bits & 0x7fffffff;
    if (magnitude > 0x7f800000) return (uint16_t)(sign | 0x7e00 | (bits >> 13 & 0x3ff));
    if (magnitude >= 0x477ff000) return (uint16_t)(sign | 0x7c00);            // 65520 and above round to Inf
    if (magnitude < 0x38800000) {                                 // below 2^-14: a denormal of step 2^-24, which is
        float shifted = safe_float_of_bits(magnitude) + 0.5f;     // what the last bit of a float near 0.5 is worth
        uint32_t shifted_bits;
        memcpy(&shifted_bits, &shifted, 4);
        return (uint16_t)(sign | (shifted_bits - 0x3f000000));
    }
    return (uint16_t)(sign | (magnitude - (112u << 23) + 0xfff + (magnitude >> 13 & 1)) >> 13);
}

/* ---------------------------------------------------------------- names */

static inline int safe_name_compare(const void* a, const void* b)
{
    return strcmp(((const SafeTensor*)a)->name, ((const SafeTensor*)b)->name);
}

static inline const SafeTensor* safetensors_find(const SafeTensors* st, const char* name)
{
    SafeTensor key;
    key.name = name;
    return (const SafeTensor*)bsearch(&key, st->tensors, st->num_tensors, sizeof key, safe_name_compare);
}

static inline const SafeTensor* safetensors_get(const SafeTensors* st, const char* name)
{
    const SafeTensor* t = safetensors_find(st, name);
    ENSURE(t != nullptr, "%s: has no tensor \"%s\" among its %zu; it belongs to another model", st->path, name,
           st->num_tensors);
    return t;
}

/* Elements and bytes from dims and dtype. False if they do not fit 63 bits or end within a byte. */
static inline bool safe_tensor_measure(SafeTensor* t)
{
    t->num_elems = 1;
    for (int i = 0; i < t->num_dims; i++) {
        if (__builtin_mul_overflow(t->num_elems, t->dims[i], &t->num_elems)) return false;
    }
    size_t bits;
    if (__builtin_mul_overflow(t->num_elems, safe_dtypes[(int)t->dtype].elem_bits, &bits)) return false;
    t->num_bytes = bits / 8;
    return bits % 8 == 0;
}

/* ---------------------------------------------------------------- reading headers */

static inline SafeDtype safe_dtype_of_name(const char* name, const char* where)
{
    for (int i = 0; i < (int)SafeDtype::COUNT; i++) {
        if (strcmp(name, safe_dtypes[i].name) == 0) return (SafeDtype)i;
    }
    die("%s: dtype \"%.40s\" is not known", where, name);
}

/* One entry of the header. data_bytes is what the file has after its header. */
static inline SafeTensor safe_parse_tensor(const cJSON* item, const char* path, size_t data_bytes)
{
    SafeTensor t;
    memset(&t, 0, sizeof t);
    char where[1024];
    snprintf(where, sizeof where, "%.700s: tensor \"%.200s\"", path, item->string);
    t.dtype = safe_dtype_of_name(json_string(item, "dtype", where), where);
    const cJSON* shape = json_array(item, "shape", where);
    ENSURE(cJSON_GetArraySize(shape) <= SAFE_MAX_DIMS, "%s: has %d dimensions, at most %d can be read", where,
           cJSON_GetArraySize(shape), SAFE_MAX_DIMS);
    for (const cJSON* dim = shape->child; dim != nullptr; dim = dim->next) {
        t.dims[t.num_dims++] = (size_t)json_item_int(dim, "shape", 0, JSON_MAX_INT, where);
    }
    const cJSON* offsets = json_array(item, "data_offsets", where);
    ENSURE(cJSON_GetArraySize(offsets) == 2, "%s: \"data_offsets\" has %d numbers, must have 2", where,
           cJSON_GetArraySize(offsets));
    size_t begin = (size_t)json_item_int(offsets->child, "data_offsets", 0, JSON_MAX_INT, where);
    size_t end = (size_t)json_item_int(offsets->child->next, "data_offsets", 0, JSON_MAX_INT, where);
    ENSURE(begin <= end && end <= data_bytes, "%s: is at bytes %zu to %zu of the data, the file has %zu; it was cut "
           "short: copy it again", where, begin, end, data_bytes);
    ENSURE(safe_tensor_measure(&t) && t.num_bytes == end - begin, "%s: its shape needs %zu bytes as %s, its offsets "
           "give it %zu; the header is damaged", where, t.num_bytes, safe_dtypes[(int)t.dtype].name, end - begin);
    t.offset = begin;
    t.name = strdup(item->string);
    ENSURE(t.name != nullptr, "out of host memory for a tensor's name");
    return t;
}

static inline int safe_offset_compare(const void* a, const void* b)
{
    const SafeTensor* x = (const SafeTensor*)a;
    const SafeTensor* y = (const SafeTensor*)b;
    if (x->offset != y->offset) return x->offset < y->offset ? -1 : 1;
    return x->num_bytes < y->num_bytes ? -1 : x->num_bytes > y->num_bytes;      // empty ones before what they touch
}

/* The tensors of one file must follow one another without hole or overlap to the end of the file. */
static inline void safe_check_layout(SafeTensor* tensors, size_t count, const char* path, size_t data_bytes)
{
    qsort(tensors, count, sizeof *tensors, safe_offset_compare);
    size_t at = 0;
    for (size_t i = 0; i < count; i++) {
        ENSURE(tensors[i].offset >= at, "%s: tensors \"%s\" and \"%s\" overlap at byte %zu of the data; the header is "
               "damaged", path, tensors[i - 1].name, tensors[i].name, tensors[i].offset);
        ENSURE(tensors[i].offset == at, "%s: bytes %zu to %zu of the data, before tensor \"%s\", belong to none; the "
               "header is damaged", path, at, tensors[i].offset, tensors[i].name);
        at += tensors[i].num_bytes;
    }
    ENSURE(at == data_bytes, "%s: its tensors end at byte %zu of the data, the file has %zu; bytes were added to it",
           path, at, data_bytes);
}

/* The file's bytes from `offset` on: fewer than are asked for is damage, an error of the system is not. */
static inline void safe_read_range(const SafeFile* file, void* out, size_t size_bytes, size_t offset)
{
    size_t got = pread_full(file->fd, out, size_bytes, offset);
    ENSURE(got == size_bytes || errno == 0, "%s: reading %zu bytes at byte %zu failed at byte %zu: %s", file->path,
           size_bytes, offset, offset + got, strerror(errno));
    ENSURE_INTACT(got == size_bytes, "%s: need %zu bytes at byte %zu, have %zu; the file was cut short", file->path,
                  size_bytes, offset, got);
}

static inline char* safe_read_header(const SafeFile* file, size_t* header_bytes)
{
    unsigned char length[8];
    ENSURE_INTACT(file->num_bytes >= 8, "%s: has %zu bytes, a safetensors file begins with 8 for the length of its "
                  "header; it was cut short, or is not one", file->path, file->num_bytes);
    safe_read_range(file, length, 8, 0);
    *header_bytes = 0;
    for (int i = 7; i >= 0; i--) *header_bytes = *header_bytes << 8 | length[i];
    ENSURE_INTACT(*header_bytes <= SAFE_MAX_HEADER_BYTES, "%s: says at byte 0 that its header has %zu bytes, at most "
                  "%zu are allowed; it is not a safetensors file, or damaged", file->path, *header_bytes,
                  SAFE_MAX_HEADER_BYTES);
    ENSURE_INTACT(*header_bytes <= file->num_bytes - 8, "%s: says at byte 0 that its header has %zu bytes, %zu follow; "
                  "it was cut short: copy it again", file->path, *header_bytes, file->num_bytes - 8);
    char* text = (char*)hold(malloc_checked(*header_bytes + 1));
    safe_read_range(file, text, *header_bytes, 8);
    text[*header_bytes] = 0;
    return (char*)hand_over(text);
}

static inline void safe_read_file(SafeTensors* st, const char* path)
{
    size_t file_idx = st->num_files++;
    st->files = (SafeFile*)realloc(st->files, st->num_files * sizeof *st->files);
    ENSURE(st->files != nullptr, "out of host memory for %zu files", st->num_files);
    SafeFile* file = &st->files[file_idx];
    memset(file, 0, sizeof *file);
    file->path = strdup(path);
    file->direct_fd = -1;
    file->fd = file_open(path);
    struct stat stat_of;
    ENSURE(fstat(file->fd, &stat_of) == 0 && S_ISREG(stat_of.st_mode), "%s: is not a plain file", path);
    file->num_bytes = (size_t)stat_of.st_size;

    size_t header_bytes;
    char* text = safe_read_header(file, &header_bytes);
    cJSON* header = json_parse(text, header_bytes, path);
    free(text);
    ENSURE(cJSON_IsObject(header), "%s: its header must be a JSON object, is %s", path, json_type_name(header));
    size_t data_bytes = file->num_bytes - 8 - header_bytes, num_before = st->num_tensors, num_items = 0;
    for (const cJSON* item = header->child; item != nullptr; item = item->next) num_items++;
    st->tensors = (SafeTensor*)realloc(st->tensors, (num_before + num_items + 1) * sizeof(SafeTensor));
    ENSURE(st->tensors != nullptr, "out of host memory for %zu tensors", num_before + num_items);
    for (const cJSON* item = header->child; item != nullptr; item = item->next) {
        if (strcmp(item->string, "__metadata__") == 0) continue;
        st->tensors[st->num_tensors++] = safe_parse_tensor(item, path, data_bytes);
    }
    cJSON_Delete(header);
    safe_check_layout(st->tensors + num_before, st->num_tensors - num_before, path, data_bytes);
    for (size_t i = num_before; i < st->num_tensors; i++) {
        st->tensors[i].file_idx = file_idx;
        st->tensors[i].offset += 8 + header_bytes;
    }
}

/* Every file that the index names is read once; afterwards each tensor must be where the index says. */
static inline void safe_read_index_files(SafeTensors* st, const cJSON* weight_map, const char* index_path)
{
    const char* slash = strrchr(index_path, '/');
    int folder_length = slash != nullptr ? (int)(slash - index_path) + 1 : 0;
    for (const cJSON* item = weight_map->child; item != nullptr; item = item->next) {
        ENSURE(cJSON_IsString(item) && item->valuestring[0] != 0 && strchr(item->valuestring, '/') == nullptr,
               "%s: \"weight_map\" must give a file name in the same folder for \"%s\"", index_path, item->string);
        char path[4096];
        int used = snprintf(path, sizeof path, "%.*s%s", folder_length, index_path, item->valuestring);
        ENSURE(used < (int)sizeof path, "%s: the path of \"%s\" is too long", index_path, item->valuestring);
        bool known = st->num_files > 0 && strcmp(st->files[st->num_files - 1].path, path) == 0;    // the usual case
        for (size_t i = 0; i < st->num_files && !known; i++) known = strcmp(st->files[i].path, path) == 0;
        if (!known) safe_read_file(st, path);
    }
}

/* Of a tensor that several files have, the copies that are not where the index says are left out: an overlay file takes
 * the place of a part of a shard. */
static inline void safe_drop_stale(SafeTensors* st, const cJSON* weight_map)
{
    qsort(st->tensors, st->num_tensors, sizeof *st->tensors, safe_name_compare);
    size_t num_kept = 0;
    bool as_before = false;
    for (size_t i = 0; i < st->num_tensors; i++) {
        const SafeTensor t = st->tensors[i];
        const bool as_next = i + 1 < st->num_tensors && strcmp(t.name, st->tensors[i + 1].name) == 0;
        const cJSON* of = as_before || as_next ? json_get(weight_map, t.name) : nullptr;
        const char* path = st->files[t.file_idx].path;
        const char* slash = strrchr(path, '/');
        as_before = as_next;
        if (of == nullptr || strcmp(slash != nullptr ? slash + 1 : path, of->valuestring) == 0)
            st->tensors[num_kept++] = t;
        else free((char*)t.name);
    }
    st->num_tensors = num_kept;
}

static inline void safe_sort_and_check_names(SafeTensors* st)
{
    qsort(st->tensors, st->num_tensors, sizeof *st->tensors, safe_name_compare);
    for (size_t i = 1; i < st->num_tensors; i++) {
        const SafeTensor* t = &st->tensors[i];
        ENSURE(strcmp(t->name, t[-1].name) != 0, "%s: has two tensors \"%s\"", st->path, t->name);
    }
}

static inline void safe_check_index(const SafeTensors* st, const cJSON* weight_map, const char* index_path)
{
    for (const cJSON* item = weight_map->child; item != nullptr; item = item->next) {
        const SafeTensor* t = safetensors_find(st, item->string);
        const char* path = t != nullptr ? st->files[t->file_idx].path : "";
        const char* slash = strrchr(path, '/');
        ENSURE(t != nullptr && strcmp(slash != nullptr ? slash + 1 : path, item->valuestring) == 0,
               "%s: says that %s has the tensor \"%s\", it does not; the files belong to different models",
               index_path, item->valuestring, item->string);
    }
}

/* path may be a .safetensors file, such a name of which only its index exists, an index, or a folder. */
static inline SafeTensors* safetensors_open(const char* path)
{
    SafeTensors* st = (SafeTensors*)malloc_checked(sizeof *st);
    memset(st, 0, sizeof *st);
    st->path = strdup(path);
    char file[4096], index[4200];
    bool is_folder = file_kind(path) == S_IFDIR;
    int used = snprintf(file, sizeof file, "%s%s", path, is_folder ? "/model.safetensors" : "");
    ENSURE(used < (int)sizeof file, "%s: the path is too long", path);
    bool is_index = used > 5 && strcmp(file + used - 5, ".json") == 0;
    snprintf(index, sizeof index, "%s%s", file, is_index ? "" : ".index.json");
    if (file_kind(file) == S_IFREG && !is_index) {
        safe_read_file(st, file);
        safe_sort_and_check_names(st);
        return st;
    }
    ENSURE(file_kind(index) == S_IFREG,
           "%s: %s; weights are a .safetensors file, its .index.json, or a folder "
           "with model.safetensors or model.safetensors.index.json", path,
           is_folder ? "has no weights" : file_kind(path) != 0 ? "is no file of weights" : "cannot be found");
    cJSON* root = json_parse_file(index);
    const cJSON* weight_map = json_object(root, "weight_map", index);
    ENSURE(weight_map->child != nullptr, "%s: \"weight_map\" names no tensor", index);
    safe_read_index_files(st, weight_map, index);
    safe_drop_stale(st, weight_map);
    safe_sort_and_check_names(st);
    safe_check_index(st, weight_map, index);
    cJSON_Delete(root);
    return st;
}

static inline void safetensors_close(SafeTensors* st)
{
    for (size_t i = 0; i < st->num_files; i++) {
        if (st->files[i].fd >= 0) close(st->files[i].fd);
        if (st->files[i].direct_fd >= 0) close(st->files[i].direct_fd);
        free(st->files[i].path);
        free(st->files[i].header);
    }
    for (size_t i = 0; i < st->num_tensors; i++) free((char*)st->tensors[i].name);
    free(st->files);
    free(st->tensors);
    free(st->index);
    free(st->path);
    free(st);
}

/* ---------------------------------------------------------------- reading elements */

/* Elements of a tensor as they are in their file, into out. */
static inline void safetensors_read_bytes(const SafeTensors* st, const SafeTensor* t, size_t first_elem,
                                          size_t num_elems, void* out)
{
    size_t bits = safe_dtypes[(int)t->dtype].elem_bits;
    ENSURE(first_elem <= t->num_elems && num_elems <= t->num_elems - first_elem, "%s: tensor \"%s\" has %zu "
           "elements, %zu to %zu were asked for", st->path, t->name, t->num_elems, first_elem, first_elem + num_elems);
    ENSURE(bits % 8 == 0, "%s: tensor \"%s\" is %s, which has no whole bytes", st->path, t->name,
           safe_dtypes[(int)t->dtype].name);
    safe_read_range(&st->files[t->file_idx], out, num_elems * bits / 8, t->offset + first_elem * bits / 8);
    st->num_read_bytes += num_elems * bits / 8;
}

#define SAFE_CONVERT_ELEMS ((size_t)16384)       // of 16 bits, converted at once

static inline void safetensors_read_f32(const SafeTensors* st, const SafeTensor* t, size_t first_elem, size_t num_elems,
                                        float* out)
{
    bool is_f16 = t->dtype == SafeDtype::F16;
    ENSURE(t->dtype == SafeDtype::F32 || is_f16 || t->dtype == SafeDtype::BF16, "%s: tensor \"%s\" is %s; weights are "
           "read as F32, F16 or BF16: convert the file", st->files[t->file_idx].path, t->name,
           safe_dtypes[(int)t->dtype].name);
    if (t->dtype == SafeDtype::F32) {
        safetensors_read_bytes(st, t, first_elem, num_elems, out);
        return;
    }
    uint16_t half[SAFE_CONVERT_ELEMS];
    for (size_t done = 0; done < num_elems; ) {
        size_t n = num_elems - done < SAFE_CONVERT_ELEMS ? num_elems - done : SAFE_CONVERT_ELEMS;
        safetensors_read_bytes(st, t, first_elem + done, n, half);
        for (size_t i = 0; i < n; i++)
            out[done + i] = is_f16 ? safe_float_of_f16(half[i]) : safe_float_of_bits((uint32_t)half[i] << 16);
        done += n;
    }
}

/* ---------------------------------------------------------------- planning files to write */

static inline int safe_file_order_compare(const void* a, const void* b)
{
    const SafeTensor* x = (const SafeTensor*)a;
    const SafeTensor* y = (const SafeTensor*)b;
    if (x->file_idx != y->file_idx) return x->file_idx < y->file_idx ? -1 : 1;
    if (x->dtype != y->dtype) return x->dtype < y->dtype ? -1 : 1;
    return strcmp(x->name, y->name);
}

/* huggingface_hub's rule: a tensor larger than a whole file gets one of its own, at once; the others fill a file until
 * the next one would pass the limit. Returns the number of files. */
static inline size_t safe_assign_files(SafeTensor* tensors, size_t count, size_t max_file_bytes)
{
    size_t num_files = 0, fill_bytes = 0, open_first = 0;     // tensors of the open file: file_idx SIZE_MAX
    for (size_t i = 0; i < count; i++) {
        if (tensors[i].num_bytes > max_file_bytes) {
            tensors[i].file_idx = num_files++;
            continue;
        }
        if (fill_bytes + tensors[i].num_bytes > max_file_bytes) {
            for (size_t j = open_first; j < i; j++) {
                if (tensors[j].file_idx == SIZE_MAX) tensors[j].file_idx = num_files;
            }
            num_files++;
            open_first = i;
            fill_bytes = 0;
        }
        tensors[i].file_idx = SIZE_MAX;
        fill_bytes += tensors[i].num_bytes;
    }
    bool any_open = false;
    for (size_t j = open_first; j < count; j++) {
        if (tensors[j].file_idx != SIZE_MAX) continue;
        tensors[j].file_idx = num_files;
        any_open = true;
    }
    return num_files + (any_open || count == 0);
}

/* Header and offsets of one file, whose tensors are sorted by safe_file_order_compare. */
static inline void safe_plan_header(SafeFile* file, SafeTensor* tensors, size_t count)
{
    JsonText t = {nullptr, 0, 0};
    json_text_add(&t, "%8s{\"__metadata__\":{\"format\":\"pt\"}", "");
    size_t at = 0;
    for (size_t i = 0; i < count; i++) {
        json_text_add(&t, ",");
        json_text_quote(&t, tensors[i].name);
        json_text_add(&t, ":{\"dtype\":\"%s\",\"shape\":[", safe_dtypes[(int)tensors[i].dtype].name);
        for (int d = 0; d < tensors[i].num_dims; d++) json_text_add(&t, "%s%zu", d ? "," : "", tensors[i].dims[d]);
        json_text_add(&t, "],\"data_offsets\":[%zu,%zu]}", at, at + tensors[i].num_bytes);
        tensors[i].offset = at;
        at += tensors[i].num_bytes;
    }
    json_text_add(&t, "}");
    while (t.length % 8 != 0) json_text_add(&t, " ");
    uint64_t header_bytes = t.length - 8;
    memcpy(t.text, &header_bytes, 8);                // little-endian
    for (size_t i = 0; i < count; i++) tensors[i].offset += t.length;
    file->header = t.text;
    file->header_bytes = t.length;
    file->num_bytes = t.length + at;
}

/* The text that transformers writes: json.dumps(indent=2, sort_keys=True) and a newline. */
static inline char* safe_plan_index(const SafeTensors* st, size_t total_bytes, size_t total_elems)
{
    JsonText t = {nullptr, 0, 0};
    json_text_add(&t, "{\n  \"metadata\": {\n    \"total_parameters\": %zu,\n    \"total_size\": %zu\n  },\n"
                  "  \"weight_map\": {", total_elems, total_bytes);
    for (size_t i = 0; i < st->num_tensors; i++) {
        json_text_add(&t, "%s\n    ", i ? "," : "");
        json_text_quote(&t, st->tensors[i].name);
        json_text_add(&t, ": ");
        const char* path = st->files[st->tensors[i].file_idx].path;
        const char* slash = strrchr(path, '/');
        json_text_quote(&t, slash != nullptr ? slash + 1 : path);
    }
    json_text_add(&t, "\n  }\n}\n");
    return t.text;
}

/* path ends in .safetensors. name, dtype, num_dims and dims of each tensor are read, the rest is worked out.
 * The same arguments give the same plan on every rank. */
static inline SafeTensors* safetensors_plan(const char* path, const SafeTensor* tensors, size_t count,
                                            size_t max_file_bytes)
{
    size_t length = strlen(path), stem = length - strlen(".safetensors");
    ENSURE(length > strlen(".safetensors") && strcmp(path + stem, ".safetensors") == 0,
           "%s: a file of tensors must be called something.safetensors", path);
    SafeTensors* st = (SafeTensors*)malloc_checked(sizeof *st);
    memset(st, 0, sizeof *st);
    st->path = strdup(path);
    st->num_tensors = count;
    st->tensors = (SafeTensor*)malloc_checked(count * sizeof *tensors);
    size_t total_bytes = 0, total_elems = 0;
    for (size_t i = 0; i < count; i++) {
        SafeTensor* t = &st->tensors[i];
        *t = tensors[i];
        t->name = strdup(t->name);
        ENSURE(t->num_dims <= SAFE_MAX_DIMS && safe_tensor_measure(t), "%s: tensor \"%s\" has a shape that no file "
               "holds", path, t->name);
        total_bytes += t->num_bytes;
        total_elems += t->num_elems;
    }
    st->num_files = safe_assign_files(st->tensors, count, max_file_bytes);
    st->files = (SafeFile*)malloc_checked(st->num_files * sizeof *st->files);
    memset(st->files, 0, st->num_files * sizeof *st->files);
    qsort(st->tensors, count, sizeof *st->tensors, safe_file_order_compare);
    for (size_t f = 0, first = 0; f < st->num_files; f++) {
        size_t end = first;
        while (end < count && st->tensors[end].file_idx == f) end++;
        SafeFile* file = &st->files[f];
        file->fd = file->direct_fd = -1;
        file->path = (char*)malloc_checked(length + 32);
        snprintf(file->path, length + 32, "%.*s-%05zu-of-%05zu.safetensors", (int)stem, path, f + 1, st->num_files);
        if (st->num_files == 1) strcpy(file->path, path);
        safe_plan_header(file, st->tensors + first, end - first);
        first = end;
    }
    safe_sort_and_check_names(st);
    if (st->num_files > 1) st->index = safe_plan_index(st, total_bytes, total_elems);
    return st;
}

/* ---------------------------------------------------------------- writing */

static inline void safe_write_cached(const SafeFile* file, const void* data, size_t size_bytes, size_t offset)
{
    for (size_t done = 0; done < size_bytes;) {
        ssize_t n = TEMP_FAILURE_RETRY(pwrite(file->fd, (const char*)data + done, size_bytes - done,
                                              (off_t)(offset + done)));
        if (n == 0) errno = ENOSPC;
        ENSURE(n > 0, "%s: writing %zu bytes at byte %zu of %zu failed: %s%s", file->path, size_bytes - done,
               offset + done, file->num_bytes, strerror(errno), write_advice(errno));
        done += (size_t)n;
    }
}

/* Whole pages bypass the page cache, which spares a copy and what it costs to forget it again, if `data` is at the
 * same place in a page as in the file. The rest of a page may be another rank's: both write into the cache's page. What
 * cannot go directly, goes through the cache, which then says why it fails. */
static inline void safe_write_range(const SafeFile* file, const void* data, size_t size_bytes, size_t offset)
{
    size_t lead = -offset % SAFE_DIRECT_BYTES, done = 0;
    if (file->direct_fd >= 0 && size_bytes > lead && ((uintptr_t)data - offset) % SAFE_DIRECT_BYTES == 0) {
        safe_write_cached(file, data, lead, offset);
        size_t pages_bytes = (size_bytes - lead) / SAFE_DIRECT_BYTES * SAFE_DIRECT_BYTES;
        ssize_t n = pages_bytes == 0 ? 0 : TEMP_FAILURE_RETRY(
            pwrite(file->direct_fd, (const char*)data + lead, pages_bytes, (off_t)(offset + lead)));
        done = lead + (n > 0 ? (size_t)n : 0);
    }
    safe_write_cached(file, (const char*)data + done, size_bytes - done, offset + done);
}

/* `mode` is O_CREAT | O_TRUNC for the rank that makes it. */
static inline bool safe_open_to_write(SafeFile* file, int mode)
{
    file->fd = (int)TEMP_FAILURE_RETRY(open(file->path, O_RDWR | O_CLOEXEC | mode, 0666));
    if (file->fd < 0) return false;
    file->direct_fd = (int)TEMP_FAILURE_RETRY(open(file->path, O_WRONLY | O_DIRECT | O_CLOEXEC));
    return true;
}

/* The room is taken at once where the file system can, so that a full disk is met here and not in the middle. */
static inline void safe_create_file(SafeFile* file)
{
    ENSURE(safe_open_to_write(file, O_CREAT | O_TRUNC), "%s: cannot be created: %s", file->path, strerror(errno));
    const off_t length = (off_t)file->num_bytes;
    int result = (int)TEMP_FAILURE_RETRY(fallocate(file->fd, 0, 0, length));
    if (result != 0 && (errno == ENOSPC || errno == EDQUOT || errno == EFBIG)) {
        int why = errno;
        struct statvfs fs;
        size_t free_bytes = fstatvfs(file->fd, &fs) == 0 ? (size_t)fs.f_bavail * fs.f_frsize : 0;
        die("%s: needs %zu bytes, the file system has %zu free: %s%s", file->path, file->num_bytes, free_bytes,
            strerror(why), write_advice(why));
    }
    ENSURE(TEMP_FAILURE_RETRY(ftruncate(file->fd, length)) == 0, "%s: cannot be made %zu bytes long: %s",
           file->path, file->num_bytes, strerror(errno));
    safe_write_range(file, file->header, file->header_bytes, 0);
}

static inline void safetensors_create_files(SafeTensors* st)
{
    for (size_t i = 0; i < st->num_files; i++) safe_create_file(&st->files[i]);
    if (st->index == nullptr) return;
    char path[4200];
    snprintf(path, sizeof path, "%s.index.json", st->path);
    file_write(path, st->index, strlen(st->index));
}

static inline void safetensors_open_files(SafeTensors* st)
{
    for (size_t i = 0; i < st->num_files; i++) {
        ENSURE(safe_open_to_write(&st->files[i], 0), "%s: cannot be opened for writing: %s; it was created by another "
               "rank: is the folder shared between the hosts?", st->files[i].path, strerror(errno));
    }
}

static inline void safetensors_write_bytes(const SafeTensors* st, const SafeTensor* t, size_t first_elem,
                                           size_t num_elems, const void* src)
{
    size_t bits = safe_dtypes[(int)t->dtype].elem_bits;
    ENSURE(bits % 8 == 0 && first_elem <= t->num_elems && num_elems <= t->num_elems - first_elem,
           "%s: tensor \"%s\" has %zu elements, %zu to %zu were to be written", st->path, t->name, t->num_elems,
           first_elem, first_elem + num_elems);
    safe_write_range(&st->files[t->file_idx], src, num_elems * bits / 8, t->offset + first_elem * bits / 8);
}

/* Refuses the first finite value that would be infinite in the tensor's type: between the largest of the type and the
 * next power of two, from the middle on. */
static inline void safetensors_ensure_fits(const SafeTensors* st, const SafeTensor* t, size_t first_elem,
                                           size_t num_elems, const float* src)
{
    const bool is_f16 = t->dtype == SafeDtype::F16;
    if (t->dtype != SafeDtype::BF16 && !is_f16) return;
    const float too_large = is_f16 ? 65520.0f : 0x1.ffp127f, largest = is_f16 ? 65504.0f : 0x1.fep127f;
    size_t i = 0;
    while (i < num_elems && !(fabsf(src[i]) >= too_large && std::isfinite(src[i]))) i++;
    if (i == num_elems) return;
    char place[24 * SAFE_MAX_DIMS] = "";
    for (size_t d = (size_t)t->num_dims, rest = first_elem + i; d-- > 0; rest /= t->dims[d]) {
        char tail[sizeof place];
        snprintf(tail, sizeof tail, "%zu%s%.100s", rest % t->dims[d], place[0] ? ", " : "", place);
        memcpy(place, tail, sizeof place);
    }
    die("%s: tensor %s has %.9g at [%s], beyond the largest %s, %.9g: give --export-dtype %s", st->path, t->name,
        src[i], place, safe_dtypes[(int)t->dtype].name, largest, is_f16 ? "bf16 or fp32" : "fp32");
}

static inline void safetensors_write_f32(const SafeTensors* st, const SafeTensor* t, size_t first_elem,
                                         size_t num_elems, const float* src)
{
    bool is_f16 = t->dtype == SafeDtype::F16;
    ENSURE(t->dtype == SafeDtype::F32 || is_f16 || t->dtype == SafeDtype::BF16, "%s: tensor \"%s\" is %s, floats are "
           "written as F32, F16 or BF16", st->path, t->name, safe_dtypes[(int)t->dtype].name);
    if (t->dtype == SafeDtype::F32) {
        safetensors_write_bytes(st, t, first_elem, num_elems, src);
        return;
    }
    safetensors_ensure_fits(st, t, first_elem, num_elems, src);
    uint16_t half[SAFE_CONVERT_ELEMS];
    for (size_t done = 0; done < num_elems;) {
        size_t n = num_elems - done < SAFE_CONVERT_ELEMS ? num_elems - done : SAFE_CONVERT_ELEMS;
        for (size_t i = 0; i < n; i++) {
            half[i] = is_f16 ? safe_f16_of_float(src[done + i]) : safe_bf16_of_float(src[done + i]);
        }
        safetensors_write_bytes(st, t, first_elem + done, n, half);
        done += n;
    }
}

static inline void safetensors_sync(const SafeTensors* st)
{
    for (size_t i = 0; i < st->num_files; i++) {
        ENSURE(TEMP_FAILURE_RETRY(fsync(st->files[i].fd)) == 0, "%s: bringing it to the disk failed: %s",
               st->files[i].path, strerror(errno));
    }
}
