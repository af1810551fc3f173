/* host_mpi.h: blocking MPI calls of the host in the emulated build; part of nccl.cpp.
 * A GPU works on while its host waits in MPI, and so does the collective that another rank's host is waiting for. Here
 * the host would stop its own device: so each blocking call is started without blocking, through MPI's profiling
 * interface, and streams run until it is done. */

static int wait_with_streams(MPI_Request* request, MPI_Status* status)
{
    unsigned num_tries = 0;
    for (;;) {
        int done = 0, error = PMPI_Test(request, &done, status);
        if (error != MPI_SUCCESS || done) return error;
        if (!stream_step()) wait_politely(&num_tries);
    }
}

#define HOST_MPI(start) \
    { \
        MPI_Request request; \
        int error = start; \
        return error != MPI_SUCCESS ? error : wait_with_streams(&request, MPI_STATUS_IGNORE); \
    }

extern "C" {

int MPI_Barrier(MPI_Comm comm) HOST_MPI(PMPI_Ibarrier(comm, &request))

int MPI_Bcast(void* p, int count, MPI_Datatype type, int root, MPI_Comm comm)
    HOST_MPI(PMPI_Ibcast(p, count, type, root, comm, &request))

int MPI_Allreduce(const void* in, void* out, int count, MPI_Datatype type, MPI_Op op, MPI_Comm comm)
    HOST_MPI(PMPI_Iallreduce(in, out, count, type, op, comm, &request))

int MPI_Reduce(const void* in, void* out, int count, MPI_Datatype type, MPI_Op op, int root, MPI_Comm comm)
    HOST_MPI(PMPI_Ireduce(in, out, count, type, op, root, comm, &request))

int MPI_Allgather(const void* in, int in_count, MPI_Datatype in_type, void* out, int out_count, MPI_Datatype out_type,
                  MPI_Comm comm)
    HOST_MPI(PMPI_Iallgather(in, in_count, in_type, out, out_count, out_type, comm, &request))

int MPI_Gather(const void* in, int in_count, MPI_Datatype in_type, void* out, int out_count, MPI_Datatype out_type,
               int root, MPI_Comm comm)
    HOST_MPI(PMPI_Igather(in, in_count, in_type, out, out_count, out_type, root, comm, &request))

int MPI_Send(const void* p, int count, MPI_Datatype type, int peer, int tag, MPI_Comm comm)
    HOST_MPI(PMPI_Isend(p, count, type, peer, tag, comm, &request))

int MPI_Recv(void* p, int count, MPI_Datatype type, int peer, int tag, MPI_Comm comm, MPI_Status* status)
{
    MPI_Request request;
    int error = PMPI_Irecv(p, count, type, peer, tag, comm, &request);
    return error != MPI_SUCCESS ? error : wait_with_streams(&request, status);
}

}
