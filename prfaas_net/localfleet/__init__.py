"""A whole deployment on one machine: two clusters, a shaped link between them, a gateway. For a first look, for
demonstrations and for end-to-end tests; a real fleet is started by systemd or Kubernetes."""
