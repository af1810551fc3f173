/* utf8.h: characters of UTF-8 text.
 *   n = utf8_char(text, length, &code)   bytes of the character at text (length > 0), and its code point; 0: no UTF-8
 *   n = utf8_space(text, length)         the same if it is white space, else 0 */
#pragma once
#include <cstddef>

static inline size_t utf8_char(const char* text, size_t length, unsigned* code)
{
    const unsigned char* s = (const unsigned char*)text;
    const size_t n = s[0] < 0x80 ? 1 : s[0] < 0xC2 ? 0 : s[0] < 0xE0 ? 2 : s[0] < 0xF0 ? 3 : s[0] < 0xF5 ? 4 : 0;
    if (n == 0 || n > length) return 0;
    unsigned c = n == 1 ? s[0] : s[0] & (0x7Fu >> n);
    for (size_t i = 1; i < n; i++) {
        if ((s[i] & 0xC0) != 0x80) return 0;
        c = c << 6 | (s[i] & 0x3Fu);
    }
    const bool too_long = (n == 3 && c < 0x800) || (n == 4 && c < 0x10000);
    const bool no_char = (c >= 0xD800 && c < 0xE000) || c > 0x10FFFF;
    *code = c;
    return too_long || no_char ? 0 : n;
}

/* That of Unicode, White_Space. */
static inline size_t utf8_space(const char* text, size_t length)
{
    unsigned c = 0;
    const size_t n = utf8_char(text, length, &c);
    const bool is_space = (c >= 0x9 && c <= 0xD) || c == 0x20 || c == 0x85 || c == 0xA0 || c == 0x1680 ||
                          (c >= 0x2000 && c <= 0x200A) || c == 0x2028 || c == 0x2029 || c == 0x202F || c == 0x205F ||
                          c == 0x3000;
    return is_space ? n : 0;
}
