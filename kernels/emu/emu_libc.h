/* emu_libc.h: included into every program file of the checked build, before all else: the C library's functions that
 * read or write memory given to them are called under other names, whose definitions in emu_check.cpp tell the checker.
 * Those that g++ expands into loads and stores it has instrumented itself. */
#pragma once
#include <cstdio>
#include <cstring>
#include <unistd.h>

extern "C" {
void* memcpy(void* to, const void* from, size_t size) noexcept __asm__("emu_checked_memcpy");
void* memmove(void* to, const void* from, size_t size) noexcept __asm__("emu_checked_memmove");
void* memset(void* p, int value, size_t size) noexcept __asm__("emu_checked_memset");
size_t fread(void* to, size_t size, size_t n, FILE* file) __asm__("emu_checked_fread");
size_t fwrite(const void* from, size_t size, size_t n, FILE* file) __asm__("emu_checked_fwrite");
ssize_t pread(int fd, void* to, size_t size, off_t offset) __asm__("emu_checked_pread");
ssize_t pwrite(int fd, const void* from, size_t size, off_t offset) __asm__("emu_checked_pwrite");
ssize_t read(int fd, void* to, size_t size) __asm__("emu_checked_read");
ssize_t write(int fd, const void* from, size_t size) __asm__("emu_checked_write");
}
