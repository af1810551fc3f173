# train_gpt: `make` builds ./train_gpt for this machine, `make help` lists the other targets.
# One object per precision is compiled from train_gpt.cu and linked into one binary, build/DEVICE/train_gpt.

SHELL       := /bin/bash
.SHELLFLAGS := -o pipefail -c

HAVE_GPU       := $(shell nvidia-smi -L 2>/dev/null | grep -m 1 '^GPU ')
DEFAULT_DEVICE := $(if $(HAVE_GPU),cuda,cpu)
DEVICE         ?= $(DEFAULT_DEVICE)
# Variants of the emulated build: CHECK=1 (kernels/emu/emu_check.cpp) and COVERAGE=1 (dev/coverage.sh). Of the CPU
# build: SANITIZE=1 (addresses, undefined behaviour, leaks) and DEV=1 (-O1, compiled in a third of the time). Of the
# build for GPUs: SHARE_GPU=1 (kernels/cpu/share_gpu.h).
VARIANT        := $(if $(filter emu,$(DEVICE)),$(if $(CHECK),check,$(if $(COVERAGE),coverage,emu)),$\
                    $(if $(SANITIZE),sanitize,$(if $(DEV),dev,$(DEVICE)$(if $(SHARE_GPU),-share))))
BUILD          := build/$(VARIANT)
ifeq ($(MAKELEVEL)$(filter -j%,$(MAKEFLAGS)),0)
  NUM_CORES := $(shell nproc)
  MAKEFLAGS += -j$(NUM_CORES)
endif

CXX  ?= g++
# The answer of scripts/toolchain.sh; its sentence is an error.
ask   = $(eval answer := $$(shell MPICC='$(MPICC)' CUDA_HOME='$(CUDA_HOME)' scripts/toolchain.sh $(1)))$\
        $(if $(filter-out 0,$(.SHELLSTATUS)),$(error $(answer)),$(answer))
LIBS := -lcjson -lpcre2-8 -ldl
# A switch over an enum has no default, so that a missing case is an error (for nvcc: below).
WARN := -Wall -Wextra -Werror=switch -Wno-unused-function -Wno-unused-parameter -Wno-unknown-pragmas

# ---- MPI and NCCL -----------------------------------------------------------------------------------------------
COMPILES := $(filter-out help clean lint list-tests,$(or $(MAKECMDGOALS),all))
ifdef NO_MPI
  MPI_FLAGS := -DNO_MPI
else ifneq ($(COMPILES),)
  COMPILER  := $(if $(filter cuda,$(DEVICE)),nvcc,gcc)
  MPI_FLAGS := -DOMPI_SKIP_MPICXX -DMPICH_SKIP_MPICXX $(call ask,mpi compile $(COMPILER))
  LIBS      += $(call ask,mpi link $(COMPILER))
endif
ifdef NO_NCCL
  MPI_FLAGS += -DNO_NCCL
endif

# ---- the three devices ------------------------------------------------------------------------------------------
# SUPPORT: replacements of the CUDA toolkit, kernels/cpu/NAME.cpp or kernels/emu/NAME.cpp.
ifeq ($(DEVICE),cpu)
  PREC       ?= fp32 bf16 fp16
  TEST_PRECS := $(PREC)
  # ISA: instruction sets of one binary (kernels/cpu/isa.h), the best first; native is this machine's.
  ISA        ?= native
  MARCH_avx512bf16 := -march=x86-64-v4 -mavx512bf16 -mprefer-vector-width=512
  MARCH_avx512 := -march=x86-64-v4 -mprefer-vector-width=512
  MARCH_avx2   := -march=x86-64-v3
  MARCH_sse2   := -march=x86-64
  MARCH      := $(or $(MARCH_$(lastword $(ISA))),-march=native)
  COMPILE    := $(CXX) -x c++ -std=c++17 -O3 $(MARCH) -fno-math-errno -fno-trapping-math -ffp-contract=fast \
                -fopenmp $(WARN) -DDEVICE_CPU -Ikernels/cpu -I. $(MPI_FLAGS)
  LINK       := $(CXX) -fopenmp
  LIBS       += -lopenblas
  SUPPORT    := runtime nccl
  ifdef SANITIZE
    COMPILE  := $(filter-out -O3,$(COMPILE)) -O1 -g -fsanitize=address,undefined -fno-sanitize-recover=undefined
    LINK     += -fsanitize=address,undefined
  else ifdef DEV
    OPT      ?= -O1
    COMPILE  := $(filter-out -O3,$(COMPILE)) $(OPT)
  endif
else ifeq ($(DEVICE),emu)
  PREC       ?= fp32 bf16 fp16
  TEST_PRECS := fp32 bf16 fp16
  COMPILE    := $(CXX) -x c++ -std=c++17 -O2 -g -ffp-contract=off -fopenmp $(WARN) -DDEVICE_EMU -Ikernels/emu \
                -Ikernels/cpu -I. $(MPI_FLAGS)
  LINK       := $(CXX) -g -fopenmp
  LIBS       += -lopenblas
  SUPPORT    := runtime nccl blaslt emu
  ifdef CHECK
    # One host thread; the emulator itself is not instrumented.
    COMPILE  := $(CXX) -x c++ -std=c++17 -O1 -g -ffp-contract=off $(WARN) -DDEVICE_EMU -DEMU_CHECK -Ikernels/emu \
                -Ikernels/cpu -I. $(MPI_FLAGS)
    CHECKED  := -fsanitize=thread --param=tsan-instrument-func-entry-exit=0 -include kernels/emu/emu_libc.h
    SUPPORT  += emu_check
  endif
  ifdef COVERAGE
    COMPILE  += -O0 --coverage
    LINK     += --coverage
  endif
else ifeq ($(DEVICE),cuda)
  PREC       ?= fp32 bf16 fp16
  TEST_PRECS := $(PREC)
  ifndef NVCC
    NVCC     := $(call ask,nvcc)
  endif
  ifneq ($(COMPILES),)
    ifeq ($(NVCC),)
      $(error $(or $(HAVE_GPU),DEVICE=cuda): no nvcc in PATH, CUDA_HOME or /usr/local/cuda*: install the CUDA toolkit \
          (docs/building.md), or build for the CPU with DEVICE=cpu)
    endif
    # ARCH, the GPUs of this machine, or those in use; PTX of the newest for later GPUs.
    ARCHS    := $(call ask,arch $(NVCC) $(ARCH))
    $(if $(NO_NCCL)$(SHARE_GPU),,$(call ask,nccl $(NVCC)))
  endif
  NEWEST     := $(lastword $(ARCHS))
  GENCODE    := $(foreach a,$(filter-out $(NEWEST),$(ARCHS)),-gencode arch=compute_$(a),code=sm_$(a)) \
                -gencode arch=compute_$(NEWEST),code=[sm_$(NEWEST),compute_$(NEWEST)]
  COMPILE    := $(NVCC) -std=c++17 -O3 --threads 0 -Xcompiler -fopenmp,-Wall,-Werror=switch -DDEVICE_CUDA -I. \
                $(MPI_FLAGS) $(GENCODE)
  LINK       := $(NVCC) -Xcompiler -fopenmp $(GENCODE)
  LIBS       += -lcublasLt $(if $(NO_NCCL)$(SHARE_GPU),,-lnccl)
  SUPPORT    :=
  ifdef SHARE_GPU
    # Only nccl.h of kernels/cpu: the toolkit's headers are found first.
    COMPILE  += -DSHARE_GPU -Xcompiler -idirafter,kernels/cpu
    SUPPORT  := nccl
    COMPILE_SUPPORT := $(CXX) -x c++ -std=c++17 -O2 $(WARN) -DDEVICE_CUDA -DSHARE_GPU -Ikernels/cpu -I. \
                $(subst -Xcompiler ,,$(MPI_FLAGS))
  endif
else
  $(error DEVICE=$(DEVICE) is not known: cpu, emu or cuda)
endif

# ---- the program ------------------------------------------------------------------------------------------------
MAIN_PREC    := $(firstword $(PREC))
ISA          ?= native
ISA_OBJS     := $(foreach isa,$(filter-out native,$(ISA)),$(PREC:%=$(BUILD)/train_gpt.%.$(isa).o))
MAIN_OBJS    := $(or $(ISA_OBJS),$(PREC:%=$(BUILD)/train_gpt.%.o))
SUPPORT_OBJS := $(SUPPORT:%=$(BUILD)/%.o)

all: $(BUILD)/train_gpt $(if $(filter $(DEVICE),$(DEFAULT_DEVICE)),train_gpt)

train_gpt: $(BUILD)/train_gpt
	ln -sf $< $@

$(BUILD)/train_gpt: $(MAIN_OBJS) $(SUPPORT_OBJS)
	$(LINK) $^ -o $@ $(LIBS)

# The object of the first precision has main(); -p selects the precision.
precision = -DPREC_$(shell echo $(1) | tr a-z A-Z)
HAVE      = $(shell echo $(PREC:%=-DHAVE_%) | sed 's/HAVE_[a-z0-9]*/\U&/g')
$(BUILD)/train_gpt.%.o: train_gpt.cu $(BUILD)/flags
	$(COMPILE) $(call precision,$*) $(if $(filter $*,$(MAIN_PREC)),-DPREC_MAIN $(HAVE)) $(CHECKED) $(MMD) -c $< -o $@

# With several instruction sets: train_gpt.PRECISION.ISA.o. The last set, which every machine has, contains main().
isa_prec = $(word 1,$(subst ., ,$(1)))
isa_name = $(word 2,$(subst ., ,$(1)))
$(ISA_OBJS): $(BUILD)/train_gpt.%.o: train_gpt.cu $(BUILD)/flags
	$(COMPILE) $(MARCH_$(call isa_name,$*)) $(call precision,$(call isa_prec,$*)) -DISA_THIS=$(call isa_name,$*) \
	    $(if $(filter $(MAIN_PREC).$(lastword $(ISA)),$*),-DPREC_MAIN $(HAVE) '-DISAS=$(patsubst %,ISA(%),$(ISA))') \
	    $(MMD) -c $< -o $@

$(BUILD)/%.o: kernels/cpu/%.cpp $(BUILD)/flags
	$(or $(COMPILE_SUPPORT),$(COMPILE)) $(if $(CHECKED),-O2) $(MMD) -c $< -o $@
$(BUILD)/%.o: kernels/emu/%.cpp $(BUILD)/flags
	$(COMPILE) $(if $(CHECKED),-O2) $(MMD) -c $< -o $@

# ---- tests ------------------------------------------------------------------------------------------------------
# Each test/test_NAME.{cu,cpp} is a program. The op tests are built once per precision: test_ops.fp32 ...
TEST_SOURCES := $(filter-out $(if $(filter $(DEVICE),emu),,test/test_emu.cu test/test_emu.cpp), \
                  $(wildcard test/test_*.cu test/test_*.cpp))
TEST_NAMES   := $(basename $(notdir $(TEST_SOURCES)))
TEST_BINS    := $(patsubst %,$(BUILD)/%,$(filter-out test_ops,$(TEST_NAMES)) \
                  $(if $(filter test_ops,$(TEST_NAMES)),$(TEST_PRECS:%=test_ops.%)))

tests: $(TEST_BINS)
list-tests:
	@echo $(TEST_BINS)

$(BUILD)/test_ops.%.o: test/test_ops.cu $(BUILD)/flags
	$(COMPILE) $(call precision,$*) -DOP_TESTS $(CHECKED) $(MMD) -c $< -o $@
$(BUILD)/test_ops.%: $(BUILD)/test_ops.%.o $(SUPPORT_OBJS)
	$(LINK) $^ -o $@ $(LIBS)
$(BUILD)/test_%.o: test/test_%.cu $(BUILD)/flags
	$(COMPILE) $(CHECKED) $(MMD) -c $< -o $@
$(BUILD)/test_%.o: test/test_%.cpp $(BUILD)/flags
	$(COMPILE) $(CHECKED) $(MMD) -c $< -o $@
$(BUILD)/test_%: $(BUILD)/test_%.o $(SUPPORT_OBJS)
	$(LINK) $^ -o $@ $(LIBS)

test:
	scripts/test.sh $(DEVICE)

# Benchmark programs of scripts in dev/.
$(BUILD)/bench_%: dev/bench_%.cpp $(BUILD)/flags
	$(COMPILE) $(MMD) $< -o $@ $(LIBS)

# Fails if a kernel spills registers to memory. Compiles for GPUs, runs without one.
spills:
	@rm -rf build/spills
	$(MAKE) -Otarget DEVICE=cuda SPILLS=1 BUILD=build/spills build/spills/train_gpt 2>&1 | dev/spills.py $(SPILLS_TABLE)
kernel-table:
	$(MAKE) spills SPILLS_TABLE="--table build/kernels.md"

# Every parser under clang's libFuzzer and sanitizers: one program with a link for each parser. Only builds;
# scripts/fuzz.sh runs them.
FUZZ_FLAGS := -std=c++17 -O1 -g -march=native -fsanitize=address,undefined,fuzzer -fno-sanitize-recover=undefined \
              $(WARN) -Wno-null-pointer-subtraction -Wno-unused-variable -DDEVICE_CPU -DPREC_FP32 -Ikernels/cpu -I. \
              $(MPI_FLAGS)
FUZZ_NAMES  = $(shell grep -o '{"[a-z]*", fuzz_' test/fuzz/fuzz.cpp | cut -d'"' -f2)
FUZZ_PARTS := $(patsubst %,build/fuzz/%.o,fuzz runtime nccl)
fuzz: $(FUZZ_PARTS)
	clang++ -fsanitize=address,undefined,fuzzer $^ -o build/fuzz/fuzz $(LIBS) -lopenblas
	@for name in $(FUZZ_NAMES); do ln -sf fuzz build/fuzz/$$name; done
build/fuzz/fuzz.o: test/fuzz/fuzz.cpp $(BUILD)/flags
	@mkdir -p build/fuzz
	clang++ $(FUZZ_FLAGS) $(MMD) -c $< -o $@
build/fuzz/%.o: kernels/cpu/%.cpp $(BUILD)/flags
	@mkdir -p build/fuzz
	clang++ $(FUZZ_FLAGS) $(MMD) -c $< -o $@

lint:
	@dev/lint.py

# ---- development -------------------------------------------------------------------------------------------------
# Compiles each header by itself, except those whose first line says that they are part of another file. Kernels and the
# emulator are also compiled for the emulated build.
HEADERS       = $(patsubst ./%,%,$(shell grep -rLE --include=*.h --include=*.cuh '^/\* \S+: part of ' $(HEADER_DIRS)))
HEADER_DIRS   = data kernels zero model run
KERNELS       = kernels/emu/% $(shell grep -l __global__ kernels/*.cuh)
HEADER_CHECK  = $(CXX) -fsyntax-only -x c++ -std=c++17 -fopenmp -Werror=switch -DPREC_BF16 -I. $(MPI_FLAGS)
CPU_HEADERS   = $(addprefix build/headers/cpu/,$(filter-out kernels/emu/%,$(HEADERS)))
headers: $(CPU_HEADERS) $(addprefix build/headers/emu/,$(filter $(KERNELS),$(HEADERS)))
	@echo "headers: $(words $^) compile by themselves"
build/headers/cpu/%: %
	@mkdir -p $(@D)
	@echo '#include "$*"' | $(HEADER_CHECK) -DDEVICE_CPU -Ikernels/cpu -MMD -MP -MT $@ -MF $@.d -
	@touch $@
build/headers/emu/%: %
	@mkdir -p $(@D)
	@echo '#include "$*"' | $(HEADER_CHECK) -DDEVICE_EMU -Ikernels/emu -Ikernels/cpu -MMD -MP -MT $@ -MF $@.d -
	@touch $@

# One precision at -O1: a quarter of the time of `make`. Its objects are in build/dev.
dev:
	@$(MAKE) DEVICE=cpu DEV=1 PREC=$(firstword $(PREC)) build/dev/train_gpt

# What to run before each commit: under a minute on two cores, from nothing.
check:
	@start=$$(date +%s); \
	$(MAKE) -s DEVICE=cpu DEV=1 PREC=fp32 lint $(CPU_HEADERS) build/dev/train_gpt build/dev/test_ops.fp32 || exit; \
	OMP_NUM_THREADS=1 build/dev/test_ops.fp32 > build/dev/test_ops.log & ops=$$!; \
	TRAIN_GPT_CPU=build/dev/train_gpt $(PYTHON) -m pytest -q -p no:cacheprovider -n 2 -m "quick and not emu" test; \
	quick=$$?; wait $$ops; ops=$$?; grep -v '^ok ' build/dev/test_ops.log; \
	echo "make check: $$(($$(date +%s) - start)) s"; exit $$((quick || ops))
PYTHON := $(firstword $(wildcard .venv/bin/python) python3)

# ---- shared ------------------------------------------------------------------------------------------------------
MMD      = -MMD -MP -MF $(@:.o=.d)
COMPILE += $(if $(SPILLS),-Xptxas -v)

FLAGS    = $(COMPILE) $(COMPILE_SUPPORT) $(CHECKED) $(LINK) $(LIBS) $(PREC) $(ISA)
# A change of flags rebuilds: the file is touched only when its text differs.
$(BUILD)/flags: force
	@mkdir -p $(BUILD)
	@echo '$(FLAGS)' | cmp -s - $@ || echo '$(FLAGS)' > $@

clean:
	rm -rf build train_gpt

help:
	@echo "make                build ./train_gpt for this machine (here: DEVICE=$(DEFAULT_DEVICE))"
	@echo "make dev            one precision at -O1, a quarter of the time: build/dev/train_gpt (PREC=bf16: another one)"
	@echo "make check          before a commit: lint, headers, op tests, quick tests; under a minute on two cores"
	@echo "make tests          build the test programs of this device"
	@echo "make test           build and run every test of this device (scripts/test.sh runs all devices)"
	@echo "make fuzz           build the fuzz targets of all parsers (clang); scripts/fuzz.sh runs them"
	@echo "make lint           check the source: lengths, includes, enums, checked calls, scripts, words"
	@echo "make headers        compile each header by itself"
	@echo "make spills         compile the CUDA kernels and fail if one spills registers"
	@echo "make kernel-table   the same, and write build/kernels.md"
	@echo "make clean          remove what was built"
	@echo
	@echo "One test            build/cpu/test_ops.fp32 layernorm        .venv/bin/python -m pytest test -k min-lr"
	@echo "Kinds of tests      pytest -m quick, ranks (mpirun), emu, slow; 'not slow' leaves the long ones out"
	@echo
	@echo "DEVICE=cpu          g++, OpenMP, OpenBLAS; needs no GPU and no CUDA toolkit"
	@echo "DEVICE=emu          the CUDA kernels themselves, run on the CPU: for tests"
	@echo "DEVICE=emu CHECK=1  the same under the memory checker: races, out-of-bounds, uninitialized reads (build/check)"
	@echo "DEVICE=cpu SANITIZE=1  the same under AddressSanitizer and UndefinedBehaviorSanitizer (build/sanitize)"
	@echo "DEVICE=cuda         nvcc, cuBLASLt, NCCL"
	@echo "ISA='avx512bf16 avx512 avx2 sse2'  one CPU binary for every x86-64 machine (default: native, this one's set)"
	@echo "PREC='fp32 bf16'    precisions to compile (now: $(PREC))"
	@echo "ARCH='80 90'        GPU architectures (cuda; default: the GPUs found, else those in use)"
	@echo "NO_MPI=1 NO_NCCL=1  one process: leave MPI or NCCL out"
	@echo "SHARE_GPU=1         cuda, for tests: ranks may share a GPU; MPI through pinned memory in place of NCCL"

# For scripts: make -s DEVICE=emu print-COMPILE
print-%:
	@echo '$($*)'

.PHONY: all tests list-tests test fuzz spills kernel-table lint headers dev check clean help force
.SECONDARY:
DEPENDENCIES := $(wildcard $(BUILD)/*.d build/fuzz/*.d $(if $(filter headers,$(MAKECMDGOALS)),\
                  $(shell find build/headers -name '*.d' 2> /dev/null)))
$(DEPENDENCIES): ;
-include $(DEPENDENCIES)
