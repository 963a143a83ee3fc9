"""What graders may use. In: a manifest's permission. Out: a network, and answers of judges and tool servers through a broker of ours."""
