/* rectangle.h: which elements of a whole matrix a part of it has (tensor parallelism). Random numbers and hashes of an
 * element use its index in the whole, so that they do not depend on how the matrix is split and over how many ranks. */
#pragma once
#include <cstddef>
#include <cstdint>
#include "hostdev.h"

/* A rectangle of a row-major matrix, or the same rectangle of several matrices side by side: rows of `cols` elements,
 * the first from element `first` of the whole on, the next `stride` elements later, and so on. The part has these from
 * the element `skip` of the first row on. cols == stride: the part is contiguous in the whole, and skip is 0. */
struct Rectangle { size_t first, skip, cols, stride; };

/* An element of the part: its index in the whole, and how many elements of the part directly follow it there. */
struct Element { size_t index, num_more; };

HOSTDEV Element element_at(const Rectangle& r, size_t i)
{
    if (r.cols == r.stride) return Element{r.first + i, SIZE_MAX};
    const size_t row = (r.skip + i) / r.cols, col = r.skip + i - row * r.cols;
    return Element{r.first + row * r.stride + col, r.cols - 1 - col};
}

/* The next one, without a division. */
HOSTDEV void element_next(const Rectangle& r, Element* e)
{
    const bool ends = e->num_more == 0;
    e->index += ends ? r.stride - r.cols + 1 : 1;
    e->num_more = ends ? r.cols - 1 : e->num_more - 1;
}

/* Element i of the part is this element of the whole. */
HOSTDEV size_t element_index(const Rectangle& r, size_t i) { return element_at(r, i).index; }

/* How many of `count` elements from i on are contiguous in the whole. */
static inline size_t elements_in_row(const Rectangle& r, size_t i, size_t count)
{
    const size_t num_more = element_at(r, i).num_more;
    return num_more < count ? num_more + 1 : count;
}

/* The part from its element i on. With i < 0 it begins with -i elements that are not of the matrix (padding): their
 * indices mean nothing. */
static inline Rectangle rectangle_from(Rectangle r, ptrdiff_t i)
{
    const size_t rows_before = i < 0 ? ((size_t)-i + r.cols - 1) / r.cols : 0;
    r.first += r.cols == r.stride ? (size_t)i : -rows_before * r.stride;
    r.skip += r.cols == r.stride ? 0 : rows_before * r.cols + (size_t)i;
    return r;
}

static inline bool rectangle_equals(const Rectangle& a, const Rectangle& b)
{
    return a.first == b.first && a.skip == b.skip && a.cols == b.cols && a.stride == b.stride;
}

static inline Rectangle rectangle_in_line(size_t first) { return Rectangle{first, 0, 1, 1}; }
