/* rectangle.h: which elements of a whole matrix a part of it has. Random numbers and hashes of an element go by its
 * index in the whole, so that they do not depend on how the matrix is cut and among how many ranks. */
#pragma once
#include <cstddef>
#include <cstdint>
#include "hostdev.h"

/* Rows of `cols` elements, of which one begins every `stride` elements of the whole: a rectangle of a matrix, or the
 * same rectangle of several matrices side by side. The part begins `skip` elements after `first`, counted in its own
 * rows. cols == stride: the elements follow one another in the whole, and skip is 0. */
struct Rectangle { size_t first, skip, cols, stride; };

/* An element of the part: its index in the whole, and how many more follow it there in line. */
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

/* How many of `count` elements from i on follow one another in the whole. */
static inline size_t elements_in_row(const Rectangle& r, size_t i, size_t count)
{
    const size_t num_more = element_at(r, i).num_more;
    return num_more < count ? num_more + 1 : count;
}

/* The part from its element i on. With i < 0 it begins with -i elements of whatever is before it, as padding is: they
 * have indices that mean nothing. */
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
