/* rectangle.h: which elements of a whole matrix a part of it has. Random numbers and hashes of an element go by its
 * index in the whole, so that they do not depend on how the matrix is cut and among how many ranks. */
#pragma once
#include <cstddef>
#include "hostdev.h"

/* Rows of `cols` elements, of which one begins every `stride` elements of the whole: a rectangle of a matrix, or the
 * same rectangle of several matrices side by side. The part begins `skip` elements after `first`, counted in its own
 * rows. cols == stride: the elements follow one another in the whole, and skip is 0. */
struct Rectangle { size_t first, skip, cols, stride; };

/* Element i of the part is this element of the whole. */
HOSTDEV size_t element_index(const Rectangle& r, size_t i)
{
    if (r.cols == r.stride) return r.first + i;
    const size_t own = r.skip + i;
    return r.first + own / r.cols * r.stride + own % r.cols;
}

/* How many of `count` elements from i on follow one another in the whole. */
static inline size_t elements_in_row(const Rectangle& r, size_t i, size_t count)
{
    const size_t left = r.cols == r.stride ? count : r.cols - (r.skip + i) % r.cols;
    return left < count ? left : count;
}

/* The part from its element i on. */
static inline Rectangle rectangle_from(Rectangle r, size_t i)
{
    (r.cols == r.stride ? r.first : r.skip) += i;
    return r;
}

static inline Rectangle rectangle_in_line(size_t first) { return Rectangle{first, 0, 1, 1}; }
