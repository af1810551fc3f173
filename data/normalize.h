/* normalize.h: text in Unicode's normal form C (Unicode Standard Annex 15), which Qwen's tokenizers ask for.
 *   char* out = normalize_nfc(text, length, &n, path)   UTF-8, to be freed; null: the text is so already
 * The work is libunistring's, a part of every Debian and Ubuntu (apt needs it). It is looked for when a text first asks
 * for it: text without characters from U+0300 on does not. Its version decides which Unicode is meant (1.0: 14). */
#pragma once
#include <cerrno>
#include <cstdint>
#include <cstring>
#include <dlfcn.h>
#include <initializer_list>
#include "error.h"

typedef uint8_t* NormalizeU8(const void* form, const uint8_t* text, size_t length, uint8_t* buffer, size_t* out_length);

static inline char* normalize_nfc(const char* text, size_t length, size_t* out_length, const char* path)
{
    bool may_change = false;                     // U+0300 is CC 80: below it nothing combines
    for (size_t i = 0; i < length && !may_change; i++) may_change = (unsigned char)text[i] >= 0xCC;
    if (!may_change) return nullptr;
    static NormalizeU8* normalize = nullptr;
    static const void* nfc = nullptr;
    for (const char* name : {"libunistring.so.5", "libunistring.so.2", "libunistring.so"}) {
        void* library = normalize == nullptr ? dlopen(name, RTLD_NOW | RTLD_LOCAL) : nullptr;
        if (library == nullptr) continue;
        normalize = (NormalizeU8*)dlsym(library, "u8_normalize");
        nfc = dlsym(library, "uninorm_nfc");
    }
    ENSURE(normalize != nullptr && nfc != nullptr, "%s: asks for texts in Unicode's form NFC, for which libunistring "
           "must be there: apt-get install libunistring2 (or libunistring5)", path);
    char* out = (char*)normalize(nfc, (const uint8_t*)text, length, nullptr, out_length);
    ENSURE(out != nullptr || errno == EILSEQ || length == 0, "a text of %zu bytes cannot be normalized: %s", length,
           strerror(errno));
    return out;                                  // null too where it is no UTF-8: who reads it next says so
}
