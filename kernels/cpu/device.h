/* device.h: what the CPU and emulated builds offer beyond NVIDIA's names. The program asks for these only where
 * DEVICE_CPU or DEVICE_EMU is defined.
 *   device_set_budget     bytes the device pretends to have; also TRAIN_GPT_DEVICE_MB. cudaMalloc fails beyond it.
 *   device_used_bytes     allocated now          device_peak_bytes    the most that ever was
 *   device_forget_peak    the most from now on
 *   pinned_used_bytes     host memory of cudaMallocHost, allocated now
 *   host_sync_count       how often the host waited for a stream, an event or the device; nothing inside a step should
 *   device_launches_wait  does a launch return when its work is done? Not with EMU_SEED
 *   nccl_wire_bytes       bytes this rank has sent to others of a communicator, by kind of collective
 *   nccl_workspace_bytes  what a communicator of num_ranks allocates once, for the memory plan
 *   nccl_staging_bytes    of pinned_used_bytes, what collectives of ranks that share a GPU are staged in */
#pragma once
#include <cstddef>
#include <cstdint>

void device_set_budget(size_t budget_bytes);
size_t device_used_bytes(void);
size_t device_peak_bytes(void);
void device_forget_peak(void);
size_t pinned_used_bytes(void);
uint64_t host_sync_count(void);
bool device_launches_wait(void);

enum class Collective { ALL_REDUCE, REDUCE_SCATTER, ALL_GATHER, BROADCAST, REDUCE, SEND_RECV };
static const int NUM_COLLECTIVES = 6;
struct ncclComm;
uint64_t nccl_wire_bytes(const struct ncclComm* comm, Collective kind);
size_t nccl_workspace_bytes(int num_ranks);
size_t nccl_staging_bytes(void);
