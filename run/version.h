/* version.h: what this binary is: version, compiler, device. */
#pragma once

#define VERSION "0.1.0"
#if defined(DEVICE_CUDA)
#define DEVICE_KIND "cuda"
#elif defined(DEVICE_EMU)
#define DEVICE_KIND "emu"
#else
#define DEVICE_KIND "cpu"
#endif
#define VERSION_LINE VERSION ", compiled " __DATE__ " with " __VERSION__ ", device " DEVICE_KIND
