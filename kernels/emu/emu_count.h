/* emu_count.h: part of emu_check.cpp: what the requests of warps cost. The n-th execution of one instruction by the
 * lanes of a warp is one request. Global memory moves sectors of 32 bytes; shared memory serves 128 bytes a wavefront,
 * one word of each bank. Counted are g++'s accesses: 16-byte ones must go through ld128 and st128, else they are four.
 * EMU_COUNT=moved prints when the program ends what each kernel and library call has moved; EMU_COUNT=1 also a table
 * per kernel and source line. */
#pragma once
#ifdef EMU_CHECK
#include "emu_shadow.h"

struct Request { uint64_t key; uint32_t block, lanes; uint64_t addr[32]; uint8_t bytes[32]; };
struct Occurrence { uint64_t key; uint32_t block, count; };
struct Counted { EmuTraffic traffic[4]; };           // of a place: 2*shared + write
struct OpTraffic { const char* name; EmuTraffic traffic; uint32_t last_run; uint64_t num_runs; };   // of a kernel
struct DeviceAllocation { const char* p; size_t size_bytes; EmuTraffic traffic; };

static Request* requests;
static Occurrence* occurrences;
static size_t requests_capacity, occurrences_capacity, num_requests, num_occurrences;
static uint32_t counted_block = 1;                   // what is of another block is free
static Counted* counted;                             // [place]
static DeviceAllocation* device_allocations;         // ascending
static size_t num_device_allocations, device_allocations_capacity;
static EmuTraffic total;
static OpTraffic op_traffics[256];
static int num_op_traffics;
static bool counting = getenv("EMU_COUNT") != nullptr;

template <class T> static T* table_find(T* table, size_t capacity, uint64_t key)
{
    size_t i = (size_t)(key * 0x9E3779B97F4A7C15ull >> 20) & (capacity - 1);
    while (table[i].block == counted_block && table[i].key != key) i = (i + 1) & (capacity - 1);
    return &table[i];
}

/* Room for one more: at most half is used. */
template <class T> static void table_grow(T** table, size_t* capacity, size_t used)
{
    if (2 * (used + 1) <= *capacity) return;
    size_t old_capacity = *capacity, new_capacity = old_capacity > 0 ? 2 * old_capacity : 1024;
    T* grown = (T*)calloc(new_capacity, sizeof(T));
    ENSURE(grown != nullptr, "out of host memory");
    for (size_t i = 0; i < old_capacity; i++) {
        if ((*table)[i].block == counted_block) *table_find(grown, new_capacity, (*table)[i].key) = (*table)[i];
    }
    free(*table);
    *table = grown;
    *capacity = new_capacity;
}

static void count_request(const void* p, size_t size_bytes, Access access, uint32_t place, bool shared)
{
    if (!counting) return;
    uint64_t kind = (shared ? 2u : 0u) + (access == Access::WRITE ? 1u : 0u), thread = (uint64_t)emu_current;
    uint64_t key = (uint64_t)place << 12 | kind << 10 | thread;
    table_grow(&occurrences, &occurrences_capacity, num_occurrences);
    Occurrence* o = table_find(occurrences, occurrences_capacity, key);
    if (o->block != counted_block) {
        *o = {key, counted_block, 0};
        num_occurrences++;
    }
    uint64_t request_key = (key >> 10) << 40 | (thread >> 5) << 32 | o->count++;
    table_grow(&requests, &requests_capacity, num_requests);
    Request* r = table_find(requests, requests_capacity, request_key);
    if (r->block != counted_block) {
        r->key = request_key;
        r->block = counted_block;
        r->lanes = 0;
        num_requests++;
    }
    unsigned lane = (unsigned)thread & 31;
    r->lanes |= 1u << lane;
    r->addr[lane] = (uint64_t)p;
    r->bytes[lane] = (uint8_t)size_bytes;
}

/* The last allocation that starts at or below p. */
static DeviceAllocation* allocation_of(const void* p)
{
    size_t lo = 0, hi = num_device_allocations;
    while (lo < hi) {
        size_t mid = (lo + hi) / 2;
        if (device_allocations[mid].p <= (const char*)p) lo = mid + 1;
        else hi = mid;
    }
    return lo > 0 ? &device_allocations[lo - 1] : nullptr;
}

static EmuTraffic* traffic_of(const void* p)
{
    DeviceAllocation* a = allocation_of(p);
    return a != nullptr ? &a->traffic : nullptr;
}

static void traffic_add(EmuTraffic* to, const EmuTraffic* t)
{
    to->requests += t->requests;
    to->read_bytes += t->read_bytes;
    to->write_bytes += t->write_bytes;
    to->block_bytes += t->block_bytes;
    to->op_bytes += t->op_bytes;
    to->sectors += t->sectors;
    to->ideal_sectors += t->ideal_sectors;
    to->wavefronts += t->wavefronts;
    to->ideal_wavefronts += t->ideal_wavefronts;
}

/* Lanes whose addresses differ; a lane that reads what another reads costs nothing. */
static unsigned different_lanes(const Request* r)
{
    unsigned lanes = 0;
    for (unsigned rest = r->lanes; rest != 0; rest &= rest - 1) {
        int lane = __builtin_ctz(rest);
        bool seen = false;
        for (unsigned before = lanes; before != 0; before &= before - 1)
            seen = seen || r->addr[__builtin_ctz(before)] == r->addr[lane];
        if (!seen) lanes |= 1u << lane;
    }
    return lanes;
}

static EmuTraffic global_cost(const Request* r, unsigned lanes)
{
    EmuTraffic t = {};
    uint64_t sectors[128], bytes = 0;
    for (unsigned rest = lanes; rest != 0; rest &= rest - 1) {
        int lane = __builtin_ctz(rest);
        bytes += r->bytes[lane];
        for (uint64_t s = r->addr[lane] / 32; s <= (r->addr[lane] + r->bytes[lane] - 1) / 32; s++) {
            bool seen = false;
            for (uint64_t i = 0; i < t.sectors; i++) seen = seen || sectors[i] == s;
            if (!seen) sectors[t.sectors++] = s;
        }
    }
    t.ideal_sectors = (bytes + 31) / 32;
    t.read_bytes = bytes;
    return t;
}

/* 16-byte accesses go by eight lanes, 8-byte ones by sixteen; in each such part the fullest bank decides. */
static EmuTraffic shared_cost(const Request* r)
{
    EmuTraffic t = {};
    uint8_t widest = 0;
    for (unsigned rest = r->lanes; rest != 0; rest &= rest - 1) {
        uint8_t bytes = r->bytes[__builtin_ctz(rest)];
        if (bytes > widest) widest = bytes;
    }
    int lanes_at_once = widest >= 16 ? 8 : widest == 8 ? 16 : 32;
    for (int first = 0; first < 32; first += lanes_at_once) {
        uint64_t words[32][32];
        int in_bank[32] = {}, fullest = 0;
        for (int lane = first; lane < first + lanes_at_once; lane++) {
            if ((r->lanes >> lane & 1) == 0) continue;
            for (uint64_t w = r->addr[lane] / 4; w <= (r->addr[lane] + r->bytes[lane] - 1) / 4; w++) {
                int bank = (int)(w & 31);
                bool seen = false;
                for (int i = 0; i < in_bank[bank]; i++) seen = seen || words[bank][i] == w;
                if (!seen) words[bank][in_bank[bank]++] = w;
                if (in_bank[bank] > fullest) fullest = in_bank[bank];
            }
        }
        t.wavefronts += (uint64_t)fullest;
        t.ideal_wavefronts += fullest > 0;
    }
    return t;
}

static void count_block_end(void)
{
    if (!counting) return;
    if (counted == nullptr) counted = (Counted*)calloc(MAX_PLACES, sizeof(Counted));
    ENSURE(counted != nullptr, "out of host memory");
    for (size_t i = 0; i < requests_capacity; i++) {
        const Request* r = &requests[i];
        if (r->block != counted_block) continue;
        uint64_t kind = r->key >> 40 & 3, place = r->key >> 42;
        unsigned lanes = different_lanes(r);
        EmuTraffic t = (kind & 2) != 0 ? shared_cost(r) : global_cost(r, lanes);
        t.requests = 1;
        if ((kind & 3) == 1) {
            t.write_bytes = t.read_bytes;
            t.read_bytes = 0;
        }
        traffic_add(&counted[place].traffic[kind], &t);
        traffic_add(&total, &t);
        EmuTraffic* of = (kind & 2) != 0 ? nullptr : traffic_of((const void*)r->addr[__builtin_ctz(r->lanes)]);
        if (of != nullptr) traffic_add(of, &t);
        if (places[place].kernel == nullptr) places[place].kernel = kernel_name;
    }
    counted_block++;
    num_requests = num_occurrences = 0;
}

static OpTraffic* op_traffic_of(const char* name)
{
    static OpTraffic* recent = op_traffics;
    if (recent->name == name) return recent;
    for (recent = op_traffics; recent < op_traffics + num_op_traffics; recent++)
        if (strcmp(recent->name, name) == 0) return recent;
    ENSURE(num_op_traffics < 256, "emulator: more than 256 kernels are counted");
    op_traffics[num_op_traffics++].name = name;
    return recent;
}

static void op_traffic_add(const char* name, const EmuTraffic* t)
{
    OpTraffic* o = op_traffic_of(name);
    o->num_runs += o->last_run != op_begin;
    o->last_run = op_begin;
    traffic_add(&o->traffic, t);
}

/* Before the cells of an access by a kernel are updated: which bytes has its block, its operation not touched yet? */
static void count_first_touches(const void* p, const Cell* first, const Cell* last, Access access)
{
    EmuTraffic t = {};
    for (const Cell* c = first; c <= last; c++) {
        uint32_t clock = access == Access::WRITE || c->write.clock > c->read.clock ? c->write.clock : c->read.clock;
        if (clock < block_begin) t.block_bytes += GRANULE;
        if (clock < op_begin) t.op_bytes += GRANULE;
    }
    if (t.block_bytes == 0) return;
    traffic_add(&total, &t);
    op_traffic_add(kernel_name, &t);
    if (EmuTraffic* of = traffic_of(p)) traffic_add(of, &t);
}

static void count_library(const void* p, size_t size_bytes, Access access, const char* name)
{
    if (!counting) return;
    EmuTraffic t = {};
    (access == Access::READ ? t.read_bytes : t.write_bytes) = size_bytes;
    t.block_bytes = t.op_bytes = size_bytes;
    t.sectors = t.ideal_sectors = (size_bytes + 31) / 32;
    traffic_add(&total, &t);
    op_traffic_add(name, &t);
    if (EmuTraffic* of = traffic_of(p)) traffic_add(of, &t);
}

static void count_allocation(const void* p, size_t size_bytes)
{
    if (num_device_allocations == device_allocations_capacity) {
        device_allocations_capacity = device_allocations_capacity > 0 ? 2 * device_allocations_capacity : 256;
        size_t bytes = device_allocations_capacity * sizeof(DeviceAllocation);
        device_allocations = (DeviceAllocation*)realloc(device_allocations, bytes);
        ENSURE(device_allocations != nullptr, "out of host memory");
    }
    device_allocations[num_device_allocations++] = {(const char*)p, size_bytes, {}};
}

void emu_count(bool on)
{
    counting = on;
    if (!on) return;
    total = {};
    for (size_t i = 0; i < num_device_allocations; i++) device_allocations[i].traffic = {};
}

EmuTraffic emu_traffic(void) { return total; }

EmuTraffic emu_traffic_of(const void* device)
{
    const EmuTraffic* t = traffic_of(device);
    return t != nullptr ? *t : EmuTraffic{};
}

/* ---- the table: the places of one kernel and source line together */

struct CountLine { char text[200]; const char* kernel; int kind; EmuTraffic traffic; };

static int count_line_order(const void* a, const void* b)
{
    const CountLine *x = (const CountLine*)a, *y = (const CountLine*)b;
    int order = strcmp(x->kernel, y->kernel);
    return order != 0 ? order : strcmp(x->text, y->text) != 0 ? strcmp(x->text, y->text) : x->kind - y->kind;
}

__attribute__((destructor)) static void count_print(void)
{
    if (!counting || counted == nullptr || getenv("EMU_COUNT") == nullptr) return;
    for (const OpTraffic* o = op_traffics; o < op_traffics + num_op_traffics; o++)
        fprintf(stderr, "moved by %s: %llu bytes in %llu runs\n", o->name, (unsigned long long)o->traffic.block_bytes,
                (unsigned long long)o->num_runs);
    if (strcmp(getenv("EMU_COUNT"), "moved") == 0) return;
    CountLine* lines = (CountLine*)calloc((size_t)num_places * 4, sizeof(CountLine));
    if (lines == nullptr) return;
    size_t num_lines = 0;
    for (uint32_t place = 1; place < num_places; place++) {
        char text[200] = "";
        for (int kind = 0; kind < 4; kind++) {
            if (counted[place].traffic[kind].requests == 0) continue;
            if (text[0] == '\0') emu_place_text(place, text, sizeof text);
            CountLine* line = &lines[num_lines++];
            memcpy(line->text, text, sizeof text);
            line->kernel = places[place].kernel;
            line->kind = kind;
            line->traffic = counted[place].traffic[kind];
        }
    }
    qsort(lines, num_lines, sizeof(CountLine), count_line_order);
    static const char* const kinds[4] = {"global load", "global store", "shared load", "shared store"};
    for (size_t i = 0; i < num_lines; i++) {
        EmuTraffic t = lines[i].traffic;
        if (i == 0 || strcmp(lines[i].kernel, lines[i - 1].kernel) != 0) fprintf(stderr, "%s\n", lines[i].kernel);
        while (i + 1 < num_lines && count_line_order(&lines[i], &lines[i + 1]) == 0)
            traffic_add(&t, &lines[++i].traffic);
        bool shared = lines[i].kind >= 2;
        uint64_t cost = shared ? t.wavefronts : t.sectors, ideal = shared ? t.ideal_wavefronts : t.ideal_sectors;
        unsigned long long bytes = t.read_bytes + t.write_bytes;
        fprintf(stderr, "  %-52s %-12s %9llu requests %11llu bytes %9llu %s, %.2f x ideal\n", lines[i].text,
                kinds[lines[i].kind], (unsigned long long)t.requests, bytes, (unsigned long long)cost,
                shared ? "wavefronts" : "sectors", (double)cost / (double)(ideal ? ideal : 1));
    }
    free(lines);
}

#endif
