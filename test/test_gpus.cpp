/* test_gpus.cpp: kernels/gpus.h finds the row of each name that nvidia-smi prints, whatever the order of the rows, and
 * none for a GPU that only sounds like one; figures by compute capability come near those of the table. */
#include "data/error.h"
#include "kernels/gpus.h"
#include <cmath>

static const struct { const char *name, *row; } names[] = {
    {"NVIDIA A100-SXM4-80GB", "A100-SXM"},
    {"NVIDIA A100-SXM4-40GB", "A100-SXM 40GB"},
    {"NVIDIA A100 80GB PCIe", "A100"},
    {"NVIDIA A100-PCIE-40GB", "A100 40GB"},
    {"NVIDIA A10", "A10"},
    {"NVIDIA A10G", "A10G"},
    {"NVIDIA A40", "A40"},
    {"NVIDIA RTX A6000", "RTX A6000"},
    {"NVIDIA L4", "L4"},
    {"NVIDIA L40", "L40"},
    {"NVIDIA L40S", "L40S"},
    {"NVIDIA H100 80GB HBM3", "H100"},
    {"NVIDIA H100 PCIe", "H100 PCIe"},
    {"NVIDIA H100 NVL", "H100 NVL"},
    {"NVIDIA H20", "H20"},
    {"NVIDIA H200", "H200"},
    {"NVIDIA H200 NVL", "H200 NVL"},
    {"NVIDIA GH200 480GB", "GH200 480GB"},
    {"NVIDIA GH200 144G HBM3e", "GH200"},
    {"NVIDIA B200", "B200"},
    {"NVIDIA GB200", "GB200"},
    {"NVIDIA B300 SXM6 AC", "B300"},
    {"NVIDIA GB300", "GB300"},
    {"NVIDIA RTX PRO 6000 Blackwell Workstation Edition", "RTX PRO 6000"},
    {"NVIDIA GeForce RTX 3090", "RTX 3090"},
    {"NVIDIA GeForce RTX 3090 Ti", "RTX 3090 Ti"},
    {"NVIDIA GeForce RTX 4080", "RTX 4080"},
    {"NVIDIA GeForce RTX 4090", "RTX 4090"},
    {"NVIDIA GeForce RTX 5090", "RTX 5090"},
    {"NVIDIA RTX 6000 Ada Generation", "RTX 6000 Ada"},
    {"h100 sxm5", "H100"},
    {"rtx 4090", "RTX 4090"},
    // Others, of which the table has no row.
    {"NVIDIA GeForce RTX 4090 D", nullptr},
    {"NVIDIA GeForce RTX 4090 Laptop GPU", nullptr},
    {"NVIDIA GeForce RTX 4080 SUPER", nullptr},
    {"NVIDIA RTX 5000 Ada Generation", nullptr},
    {"NVIDIA RTX PRO 6000 Blackwell Server Edition", nullptr},
    {"NVIDIA RTX PRO 6000 Blackwell Max-Q Workstation Edition", nullptr},
    {"NVIDIA RTX PRO 4000 Blackwell", nullptr},
    {"NVIDIA A100-SXM4-40GB MIG 1g.5gb", nullptr},
    {"NVIDIA A100-SXM-64GB", nullptr},                  // memory of another size is another GPU
    {"NVIDIA H100 64GB HBM2", nullptr},
    {"NVIDIA H100 96GB HBM3", nullptr},
    {"NVIDIA H200 141GB HBM3e", "H200"},
    {"NVIDIA H20-3e", nullptr},
    {"NVIDIA A800-SXM4-80GB", nullptr},
    {"NVIDIA H800", nullptr},
    {"NVIDIA L20", nullptr},
    {"Tesla V100-SXM2-16GB", nullptr},
    {"NVIDIA Graphics Device", nullptr},
    {"NVIDIA", nullptr},
    {"", nullptr},
};

/* Of the row: compute capability, multiprocessors and the clock of its data sheet's tensor-core peak. */
static const struct { const char *name, *row; int major, minor, num_sms; double clock_ghz; } generics[] = {
    {"NVIDIA A100-SXM4-80GB", "A100-SXM", 8, 0, 108, 1.410},
    {"NVIDIA A10", "A10", 8, 6, 72, 1.695},
    {"NVIDIA GeForce RTX 3090", "RTX 3090", 8, 6, 82, 1.695},
    {"NVIDIA L40S", "L40S", 8, 9, 142, 2.520},
    {"NVIDIA GeForce RTX 4090", "RTX 4090", 8, 9, 128, 2.520},
    {"NVIDIA H100 80GB HBM3", "H100", 9, 0, 132, 1.830},
    {"NVIDIA B200", "B200", 10, 0, 148, 1.850},
    {"NVIDIA B300 SXM6 AC", "B300", 10, 3, 148, 1.850},
    {"NVIDIA GeForce RTX 5090", "RTX 5090", 12, 0, 170, 2.407},
    {"NVIDIA RTX PRO 6000 Blackwell Workstation Edition", "RTX PRO 6000", 12, 0, 188, 2.617},
};

static int num_passed, num_failed;

static void check(bool ok, const char* what, const char* name, const char* got)
{
    if (ok) num_passed++;
    else num_failed++;
    if (!ok) printf("FAILED %s of \"%s\": %s\n", what, name, got);
}

int main(void)
{
    for (const GpuRow& row : gpu_rows) {
        const GpuRow* found = gpu_find(row.name);
        check(found == &row, "own row", row.name, found ? found->name : "none");
        check(row.tensor16_tflops > row.fp32_tflops && row.memory_gbps > row.link_gbps && row.memory_gb > 0 &&
              row.product_share > 0 && row.product_share < 1, "figures", row.name, "out of range");
        check(gpu_generation(row.capability)->capability == row.capability, "compute capability", row.name,
              "not that of a generation");
        // The peak is the generation's, half of it, or less where the export of more is forbidden.
        const int major = row.capability / 10, minor = row.capability % 10;
        const GpuRow whole = gpu_generic("X", major, minor, row.num_sms, row.clock_ghz, 0, 0);
        const double share = row.tensor16_tflops / whole.tensor16_tflops;
        check(fabs(share - 1) < 0.02 || fabs(share - 0.5) < 0.01 || strcmp(row.name, "H20") == 0, "clock", row.name,
              "multiprocessors, clock and peak do not go together");
        // No two rows match a name equally well: else their order would matter.
        for (const auto& n : names) {
            int ours = gpu_row_matches(&row, n.name);
            found = gpu_find(n.name);
            if (ours > 0 && found != &row)
                check(ours < gpu_row_matches(found, n.name), "one best row", n.name, row.name);
        }
    }
    for (const auto& n : names) {
        const GpuRow* found = gpu_find(n.name);
        bool same = found == nullptr ? n.row == nullptr : n.row != nullptr && strcmp(found->name, n.row) == 0;
        check(same, "row", n.name, found ? found->name : "none");
    }
    for (const auto& g : generics) {
        GpuRow row = gpu_generic(g.name, g.major, g.minor, g.num_sms, g.clock_ghz, 1000, 80);
        const GpuRow* known = gpu_find(g.row);
        char got[128];
        snprintf(got, sizeof got, "%.1f and %.1f TFLOP/s", row.tensor16_tflops, row.fp32_tflops);
        check(fabs(row.tensor16_tflops / known->tensor16_tflops - 1) < 0.02 &&
              fabs(row.fp32_tflops / known->fp32_tflops - 1) < 0.1, "generic figures", g.name, got);
        check(row.capability == known->capability && row.num_sms == known->num_sms &&
              fabs(row.clock_ghz / known->clock_ghz - 1) < 0.02, "multiprocessors", g.name, "not the row's");
    }
    // Between and beyond the generations: the one before. Clocks that are not known give no figure.
    check(gpu_generic("X", 8, 7, 16, 1, 0, 8).tensor16_tflops == gpu_generic("X", 8, 6, 16, 1, 0, 8).tensor16_tflops,
          "generation", "8.7", "not that of 8.6");
    check(gpu_generic("X", 13, 0, 16, 1, 0, 8).tensor16_tflops == gpu_generic("X", 12, 0, 16, 1, 0, 8).tensor16_tflops,
          "generation", "13.0", "not that of 12.0");
    check(gpu_generic("X", 9, 0, 132, 0, 0, 80).tensor16_tflops == 0, "no clock", "X", "a peak");
    // A GPU for each rank of the host, or the only one that each sees; else too few.
    check(gpu_of_rank(8, 3, 8) == 3 && gpu_of_rank(8, 3, 4) == 3, "own GPU", "of 8", "not its place on the host");
    check(gpu_of_rank(1, 3, 8) == 0 && gpu_of_rank(1, 0, 1) == 0, "own GPU", "of 1", "not the only one");
    check(gpu_of_rank(2, 3, 4) == -1, "own GPU", "of 2", "one for 4 ranks");
    printf("%d passed, %d failed\n", num_passed, num_failed);
    return num_failed > 0;
}
